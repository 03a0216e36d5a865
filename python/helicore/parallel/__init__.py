"""How several ranks share one model, and how they meet (docs/design/helix.md)."""
