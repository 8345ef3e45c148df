"""capibara: trains, fine-tunes and merges language models on TPU slices from one Gin file."""

from capibara.core import user_modules as _user_modules

__version__ = "0.1.0"

_user_modules.without_working_directory()  # before anything else is imported
