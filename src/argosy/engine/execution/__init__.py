"""Computing what was scheduled: model families, attention, sampling, on a device."""
