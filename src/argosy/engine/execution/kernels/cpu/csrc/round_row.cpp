// Rounding of a row of the KV cache, whose products are rounded before sums as in the torch reference.
#include "no_contraction.h"

#include "attention_bytes.h"

float argosy::round_row(const float *values, int64_t count, uint8_t *bytes) {
    return round_to_bytes(values, count, bytes).scale;
}
