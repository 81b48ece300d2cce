"""Operations of a model on each kind of hardware, behind the interface `device.Device`.

Package `cpu` has the native kernels, `torch` what runs anywhere, and `gpu` those in Triton. All of them read a `Batch`,
with a KV cache (`attention`) and recurrent states (`operations`) that stay on the device. `pack_cache` keeps packed
weights on disk.
"""
