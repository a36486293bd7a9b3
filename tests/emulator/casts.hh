// CUDA's casts of floats to integers, for both emulators of kernels (tests/emit/cuda_emulator.hh, device.hh): they
// saturate; NaN gives the least integer but for f32 to i32, where it gives 0.
#pragma once
#include <limits.h>

static inline long long emulated_truncate(double x, double limit, long long least) {
    return x >= limit ? ~least : x > -limit ? (long long)x : least;
}
static inline int __float2int_rz(float x) { return x == x ? (int)emulated_truncate(x, 0x1p31, INT_MIN) : 0; }
static inline int __double2int_rz(double x) { return (int)emulated_truncate(x, 0x1p31, INT_MIN); }
static inline long long __float2ll_rz(float x) { return emulated_truncate(x, 0x1p63, LLONG_MIN); }
static inline long long __double2ll_rz(double x) { return emulated_truncate(x, 0x1p63, LLONG_MIN); }
