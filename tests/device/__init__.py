"""A device without a GPU that is as strict as one: see checked_device.cpp."""
