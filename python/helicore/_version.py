"""The version; pyproject.toml and CMakeLists.txt carry the same number."""

__version__ = "0.1.0"
