/* What a caller passes to a launcher: a strided tensor in device memory. Plain C; sizes and strides are in elements. */
#pragma once
#include <stdint.h>

typedef struct attn_tensor {
  void *data;
  const int64_t *size;
  const int64_t *stride;
} attn_tensor;
