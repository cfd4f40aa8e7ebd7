"""Models that take in more than text: who reads which of them out of config.json."""

from collections.abc import Callable

from quire.config.facts import MediaFacts
from quire.config.keys import Keys

MEDIA_FAMILIES: dict[str, Callable[[Keys], tuple[Keys, MediaFacts]]] = {}
"""By architecture: what config.json says of the decoder, as if that were alone (`architectures` then names
one of the families of decoders), and what it says of the rest."""
