/* Small graphs and what they are lowered to. */
#ifndef TESTS_LOWER_SUPPORT_H
#define TESTS_LOWER_SUPPORT_H

#include "codegen/lower/lower.h"
#include "runtime/passes/passes.h"
#include "tests/test.h"

typedef struct {
    ml_graph *g;
    ml_arena *arena;
    ml_target target;
    ml_ref outputs[16];
    int output_count;
    ml_graph *simple; /* after the simplifier */
    ml_schedule *s;
    void (*build)(void *piece);
} piece;

/* Each character of `names` is an axis. */
ml_axis axis(piece *p, const char *name);
ml_ref input(piece *p, ml_dtype dtype, const char *names, const int64_t *sizes);
void output(piece *p, ml_ref n);
ml_ref number(piece *p, double value);
ml_ref mean(piece *p, ml_ref x, const char *name, double size);
ml_ref dot(piece *p, ml_ref a, ml_ref b, const char *name);
ml_ref layer_norm(piece *p, ml_ref x, double size); /* over e, with a gain and a bias */
ml_ref gelu(piece *p, ml_ref x);

#define SIZES(...) ((const int64_t[]){__VA_ARGS__})
#define ADD(a, b) ml_map2(p->g, ML_OP_ADD, a, b)
#define SUB(a, b) ml_map2(p->g, ML_OP_SUB, a, b)
#define MUL(a, b) ml_map2(p->g, ML_OP_MUL, a, b)
#define DIV(a, b) ml_map2(p->g, ML_OP_DIV, a, b)
#define FN(op, a) ml_map1(p->g, ML_OP_##op, a)

/* Build, simplify, lower for an H200 or a CPU, and verify. */
void lower_for(piece *p, ml_target_kind kind, void (*build)(void *piece));
void lower_piece(piece *p, void (*build)(void *piece)); /* for a CPU */
void free_piece(piece *p);

#endif
