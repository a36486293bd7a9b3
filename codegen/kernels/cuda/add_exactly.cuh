/* Sums that add up what rounding loses, too (Knuth's two-sum). */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#endif

/* sum += more; `lost` sums up what rounding loses. */
template <typename T> ML_INLINE void add_exactly(T &sum, T &lost, T more) {
    const T next = sum + more, part = next - sum;
    lost += (sum - (next - part)) + (more - part);
    sum = next;
}
/* Sums that are infinite lose nothing. */
template <typename T> ML_INLINE T finite(T lost) { return lost - lost == 0 ? lost : (T)0; }
