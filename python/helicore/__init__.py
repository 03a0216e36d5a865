"""helicore: an inference engine for latent-attention (MLA) language models."""

from helicore._version import __version__

__all__ = ["__version__"]
