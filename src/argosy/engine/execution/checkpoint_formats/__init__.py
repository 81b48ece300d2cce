"""Files of a checkpoint, and the forms in which they store matrices.

`checkpoint` finds the files of a model, and `reader` reads tensors under the names that they have in full
precision.

`parse_quantization` reads what config.json says, and `find_encoded_tensors` finds the matrices that are stored so. Each
is an `EncodedTensor`, which gives the dequantized matrix. A `GroupedTensor` also gives the stored integers with their
scales, for kernels that compute with them. To support a new form, add a subclass and a rule to `find_encoded_tensors`.
"""

from argosy.engine.execution.checkpoint_formats.quantization_config import (
    LOADABLE_FORMATS,
    QuantizationConfig,
    parse_quantization,
)
