// Replaced by the area.
