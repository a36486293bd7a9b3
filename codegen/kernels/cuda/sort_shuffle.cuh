/* Keys of other lanes of the warp. */
#pragma once
#include "../c/sort_keys.h"

ML_INLINE sort_key shuffle(sort_key key, int lanes) {
#if WIDE
    sort_key other;
    other.order = __shfl_xor_sync(~0u, key.order, lanes);
    other.from = __shfl_xor_sync(~0u, key.from, lanes);
    return other;
#else
    return __shfl_xor_sync(~0u, key, lanes);
#endif
}
/* The first of all lanes. */
ML_INLINE sort_key first_of_warp(sort_key key) {
    for (int d = 16; d > 0; d /= 2) {
        sort_key other = shuffle(key, d);
        if (is_before(other, key)) key = other;
    }
    return key;
}
