/* States behind some positions as functions of those before them, which compose: slope x + offset,
 * or max(x + slope, offset) where a state is max-plus. Positions one after another, or in parts
 * that are joined, give the same but for the rounding of products and sums. */
#pragma once
#define IS_MAX_PLUS(i) (MAX_PLUS >> (i)&1)
#define NO_SLOPE                                                                                   \
    (-(STATE)__uint_as_float(0x7f800000u)) /* max-plus: nothing of the state is left               \
                                            */

ML_INLINE void begin_composed(bool max_plus, STATE &slope, STATE &offset) {
    slope = max_plus ? 0 : 1;
    offset = max_plus ? NO_SLOPE : (STATE)0;
}
/* The state behind positions with this slope and offset. A state of 0 meets no infinite slope. */
ML_INLINE STATE state_behind(bool max_plus, STATE slope, STATE offset, STATE x) {
    if (max_plus) return slope == NO_SLOPE ? offset : ml_max::of(x + slope, offset);
    return x == 0 ? offset : slope * x + offset;
}
/* The slope of positions behind others. What is left of a state that a reset took stays nothing. */
ML_INLINE STATE joined_slope(bool max_plus, STATE later, STATE slope) {
    if (max_plus) return slope == NO_SLOPE ? slope : later + slope;
    return later == 0 ? 0 : later * slope;
}
