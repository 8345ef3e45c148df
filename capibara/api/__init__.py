"""Python's door: a model as an object, its data, and a function for each verb of the command line."""

from capibara.core import devices as _devices

_devices.skip_absent_tpu()  # before a function of the door computes, as every verb does
