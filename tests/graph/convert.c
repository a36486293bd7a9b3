/* Conversions of elements: every f16 and bf16 number, and roundings at and around each middle. */
#include <math.h>
#include <string.h>

#include "runtime/graph/convert.h"
#include "tests/test.h"

/* By the definition of a float of `fraction` bits of mantissa and these exponents. */
static double defined(unsigned bits, int exponents, int fraction) {
    int bias = (1 << (exponents - 1)) - 1,
        exponent = (int)(bits >> fraction) & ((1 << exponents) - 1);
    int mantissa = (int)bits & ((1 << fraction) - 1);
    double sign = bits >> (exponents + fraction) & 1 ? -1 : 1;
    if (exponent == (1 << exponents) - 1) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - fraction);
    return sign * ldexp(mantissa + (1 << fraction), exponent - bias - fraction);
}

static bool same(double a, double b) {
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

TEST(graph, every_f16_and_bf16_number) {
    int wrong = 0;
    for (unsigned bits = 0; bits < 65536; bits++) {
        uint16_t half = (uint16_t)bits;
        wrong += !same((double)ml_from_f16(half), defined(bits, 5, 10));
        wrong += !same((double)ml_from_bf16(half), defined(bits, 8, 7));
        double value = defined(bits, 8, 7);
        wrong += isnan(value) ? !isnan(ml_from_bf16(ml_to_bf16(value))) : ml_to_bf16(value) != half;
    }
    CHECK_EQ_INT(wrong, 0);
}

/* From f64, between each number and the next: below the middle, at it (to even), above it; a
 * rounding to f32 in between would make the middle of its neighbours. */
static int count_wrong(uint16_t to(double), int exponents, int fraction) {
    const unsigned infinite = ((1u << exponents) - 1) << fraction;
    int wrong = 0;
    for (unsigned bits = 0; bits < infinite; bits++) {
        double low = defined(bits, exponents, fraction);
        double high = bits + 1 == infinite ? ldexp(1, 1 << (exponents - 1))
                                           : defined(bits + 1, exponents, fraction);
        double middle = low + (high - low) / 2;
        unsigned even = bits & 1 ? bits + 1 : bits;
        for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000) {
            double s = sign ? -1 : 1;
            wrong += to(s * low) != (bits | sign);
            wrong += to(s * middle) != (even | sign);
            wrong += to(s * nextafter(middle, 0)) != (bits | sign);
            wrong += to(s * nextafter(middle, INFINITY)) != ((bits + 1) | sign);
        }
    }
    wrong += to(1e300) != infinite;
    wrong += to(-1e-300) != 0x8000;
    return wrong + !isnan(defined(to(NAN), exponents, fraction));
}

TEST(graph, narrow_floats_are_rounded_once) {
    CHECK_EQ_INT(count_wrong(ml_to_bf16, 8, 7), 0);
    CHECK_EQ_INT(count_wrong(ml_to_f16, 5, 10), 0);
}

/* Of 8 bits: each number, and what lies below, at and above the middle to the next. */
static int count_wrong_8(ml_dtype dtype, unsigned largest, double beyond) {
    int wrong = 0;
    for (unsigned bits = 0; bits <= largest; bits++) {
        const uint8_t code[2] = {(uint8_t)bits, (uint8_t)(bits + 1)};
        const double low = ml_element(dtype, code, 0);
        const double high = bits == largest ? beyond : ml_element(dtype, code, 1);
        const double middle = low + (high - low) / 2;
        const double near[4] = {low, nextafter(middle, 0), middle, nextafter(middle, INFINITY)};
        const unsigned expected[4] = {bits, bits, bits & 1 ? bits + 1 : bits, bits + 1};
        for (int i = 0; i < 8; i++) {
            uint8_t to;
            ml_set_element(dtype, &to, 0, i < 4 ? near[i] : -near[i - 4]);
            wrong += to != (expected[i % 4] | (i < 4 ? 0 : 0x80));
        }
    }
    return wrong;
}

TEST(graph, floats_of_8_bits_are_rounded_once) {
    CHECK_EQ_INT(count_wrong_8(ML_E4M3, 0x7e, 480), 0); /* what follows 448 is no number */
    CHECK_EQ_INT(count_wrong_8(ML_E5M2, 0x7b, 65536), 0);
    for (unsigned bits = 0; bits < 0x7c; bits++)
        CHECK(same((double)ml_from_e5m2((uint8_t)bits), defined(bits, 5, 2)));
    CHECK(isnan(ml_from_e4m3(ml_to_e4m3(INFINITY))) && isinf(ml_from_e5m2(ml_to_e5m2(1e30))));
    CHECK(isnan(ml_from_e5m2(ml_to_e5m2(NAN))));
}

/* Of f32, by the loop over arrays: of all that lie near an f16 or between two. */
TEST(graph, f16_of_arrays_is_that_of_numbers) {
    enum { NEAR = 5 };
    float values[2 * NEAR];
    uint16_t halves[2 * NEAR];
    int wrong = 0;
    for (unsigned bits = 0; bits < 0x7c00; bits++) {
        const float low = (float)defined(bits, 5, 10), high = (float)defined(bits + 1, 5, 10);
        const float end = isinf(high) ? 65536 : high, middle = low + (end - low) / 2;
        const float near[NEAR] = {low, nextafterf(middle, 0), middle, nextafterf(middle, 1e6f),
                                  end};
        for (int i = 0; i < NEAR; i++) values[i] = near[i], values[NEAR + i] = -near[i];
        ml_convert(ML_F32, values, ML_F16, halves, 2 * NEAR);
        for (int i = 0; i < 2 * NEAR; i++) wrong += halves[i] != ml_to_f16(values[i]);
    }
    CHECK_EQ_INT(wrong, 0);
}

TEST(graph, conversions_of_arrays) {
    static const ml_dtype floats[] = {ML_F64, ML_F32, ML_BF16}, halves[] = {ML_F64, ML_F32, ML_F16};
    const double values[] = {0, -0.0, 1.00390625, 0x1p-149, -0x1p-133, 0x1.fep127, INFINITY, NAN};
    enum { COUNT = sizeof values / sizeof *values };
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++) {
            char from[8 * COUNT], to[8 * COUNT];
            double back[COUNT], expected[COUNT];
            CHECK_EQ_INT(ml_convert(ML_F64, values, floats[a], from, COUNT), -1);
            CHECK(ml_converts(floats[a], floats[b]));
            CHECK_EQ_INT(ml_convert(floats[a], from, floats[b], to, COUNT), -1);
            CHECK_EQ_INT(ml_convert(floats[b], to, ML_F64, back, COUNT), -1);
            /* Each value as the narrower of both holds it. */
            CHECK_EQ_INT(ml_convert(ML_F64, values, floats[a > b ? a : b], from, COUNT), -1);
            CHECK_EQ_INT(ml_convert(floats[a > b ? a : b], from, ML_F64, expected, COUNT), -1);
            for (int i = 0; i < COUNT; i++) CHECK(same(back[i], expected[i]));
            ml_convert(ML_F64, values, halves[a], from, COUNT);
            CHECK_EQ_INT(ml_convert(halves[a], from, halves[b], to, COUNT), -1);
            for (int i = 0; i < COUNT; i++) {
                double value = ml_round_to(halves[b], ml_round_to(halves[a], values[i]));
                CHECK(same(ml_element(halves[b], to, i), value));
            }
        }
    const int64_t wide[] = {INT32_MAX, INT32_MIN, (int64_t)INT32_MAX + 1};
    int32_t narrow[3];
    int64_t again[3];
    CHECK_EQ_INT(ml_convert(ML_I64, wide, ML_I32, narrow, 3), 2);
    CHECK_EQ_INT(ml_convert(ML_I32, narrow, ML_I64, again, 2), -1);
    CHECK_EQ_INT(memcmp(again, wide, 16), 0);
    CHECK(!ml_converts(ML_I32, ML_F32) && !ml_converts(ML_F32, ML_I32));
    CHECK(!ml_converts(ML_BOOL, ML_I32) && ml_converts(ML_BOOL, ML_BOOL));
}
