/* Keys that sorting moves: unsigned integers in the order of the elements (NaN last), with the
 * position of the element in the low bits, so that no two are equal and any network is stable.
 * Elements of 8 bytes need a pair of both. For C and CUDA. */
#pragma once
#ifndef MLUA_EMBEDDED
#ifndef ML_INLINE
#include "prelude.h"
#endif
#define ENTRY sort
#define REAL float
#define WIDE 0     /* elements of 8 bytes */
#define IS_FLOAT 1 /* or integers */
#define DESCENDING 0
#endif

#define key_bits NAME(key_bits)
#define sort_key NAME(sort_key)
#define order_of NAME(order_of)
#define make_key NAME(make_key)
#define is_before NAME(is_before)
#define position_of NAME(position_of)
#define last_key NAME(last_key)

#if WIDE
typedef unsigned long long key_bits;
#define SIGN_BIT 0x8000000000000000ull
#else
typedef unsigned key_bits;
#define SIGN_BIT 0x80000000u
#endif

#if IS_FLOAT
/* Bits of negative numbers are inverted, those of others are above them; -0 is 0. */
ML_INLINE key_bits order_of(REAL x) {
    union {
        REAL number;
        key_bits bits;
    } u;
    if (x != x) return ~(key_bits)0;
    if (x == 0) return SIGN_BIT;
    u.number = x;
    return u.bits & SIGN_BIT ? ~u.bits : u.bits | SIGN_BIT;
}
#else
ML_INLINE key_bits order_of(REAL x) { return (key_bits)x ^ SIGN_BIT; }
#endif

#if WIDE
typedef struct {
    unsigned long long order;
    unsigned from;
} sort_key;
ML_INLINE sort_key make_key(REAL value, unsigned from) {
    sort_key key;
    key.order = DESCENDING ? ~order_of(value) : order_of(value);
    key.from = from;
    return key;
}
ML_INLINE int is_before(sort_key a, sort_key b) {
    return a.order < b.order || (a.order == b.order && a.from < b.from);
}
ML_INLINE unsigned position_of(sort_key a) { return a.from; }
ML_INLINE sort_key last_key(void) {
    sort_key key;
    key.order = ~0ull;
    key.from = ~0u;
    return key;
}
#else
typedef unsigned long long sort_key;
ML_INLINE sort_key make_key(REAL value, unsigned from) {
    unsigned order = DESCENDING ? ~order_of(value) : order_of(value);
    return (unsigned long long)order << 32 | from;
}
ML_INLINE int is_before(sort_key a, sort_key b) { return a < b; }
ML_INLINE unsigned position_of(sort_key a) { return (unsigned)a; }
ML_INLINE sort_key last_key(void) { return ~0ull; }
#endif
