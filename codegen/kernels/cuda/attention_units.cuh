/* What kernels of attention in bf16 on tensor cores share: exponents in base 2, and captured
 * tensors that end where the sequences do. */
#pragma once
#ifndef MLUA_EMBEDDED
#define CLAMPED 0       /* captured tensors must not be read behind their ends */
#define SCORED 0        /* whether there is a score function */
#define SCORE_LOG2 0.2f /* turns a score into an exponent of 2: without a function times SCALE */
#define SCORE_LN 0.125f /* turns the largest score into a logarithm */
#define NO_KEY -2e9f    /* exponents below this: a row without keys so far */
#endif

#ifndef MLUA_EMULATED
/* probabilities are rounded to bf16 anyway */
#define ml_exp_f32 ml_quick_exp_f32
#define ml_sigmoid_f32 ml_quick_sigmoid_f32
#define ml_tanh_f32 ml_hardware_tanh_f32
#endif
#if CLAMPED
#define CLAMP_QUERY qi = qi < SEQ ? qi : SEQ - 1
#define CLAMP_KEY kv = kv < KV_SEQ ? kv : KV_SEQ - 1
#else
#define CLAMP_QUERY
#define CLAMP_KEY
#endif
