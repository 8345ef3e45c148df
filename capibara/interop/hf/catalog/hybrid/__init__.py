"""Decoders in which some layers are recurrent: they have a mixer (models/mixers) in place of attention."""
