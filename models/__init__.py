"""Model definitions, one file per architecture."""
