"""The version, in one place for Python code; pyproject.toml and CMakeLists.txt carry the same number."""

__version__ = "0.1.0"
