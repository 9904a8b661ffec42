// What a library that was compiled with -fsanitize=undefined -fsanitize-minimal-runtime calls: a launch that does what is
// undefined fails, and says where. No runtime library of the compiler is needed.
#pragma once
#include <attn_fibers.h>

#define ATTN_CHECK(kind, message)                                                                     \
  extern "C" __attribute__((weak)) void __ubsan_handle_##kind##_minimal() {                            \
    attn::emulation::here().fail(message);                                                             \
  }                                                                                                    \
  extern "C" __attribute__((weak)) void __ubsan_handle_##kind##_minimal_abort() { __ubsan_handle_##kind##_minimal(); }

ATTN_CHECK(type_mismatch, "memory that is not there, or not aligned as its type")
ATTN_CHECK(alignment_assumption, "memory that is not aligned as promised")
ATTN_CHECK(out_of_bounds, "an index beyond the end of an array")
ATTN_CHECK(pointer_overflow, "a pointer beyond all memory")
ATTN_CHECK(add_overflow, "a sum that is too large for its type")
ATTN_CHECK(sub_overflow, "a difference that is too large for its type")
ATTN_CHECK(mul_overflow, "a product that is too large for its type")
ATTN_CHECK(negate_overflow, "a negation that is too large for its type")
ATTN_CHECK(divrem_overflow, "a division by zero")
ATTN_CHECK(shift_out_of_bounds, "a shift by more bits than there are")
ATTN_CHECK(float_cast_overflow, "a number too large for the type it is cast to")
ATTN_CHECK(load_invalid_value, "a truth value that is neither true nor false")
ATTN_CHECK(builtin_unreachable, "code that cannot be reached, reached")
ATTN_CHECK(missing_return, "a function that ends without a result")
ATTN_CHECK(vla_bound_not_positive, "an array without elements")
ATTN_CHECK(invalid_builtin, "a builtin of zero")
ATTN_CHECK(nonnull_arg, "a null pointer as an argument")
ATTN_CHECK(nonnull_return, "a null pointer as a result")

#undef ATTN_CHECK
