#include "tests/lower/support.h"

#include <string.h>

ml_axis axis(piece *p, const char *name) {
    return ml_axis_named(p->g, name);
}

ml_ref input(piece *p, ml_dtype dtype, const char *names, const int64_t *sizes) {
    ml_input in = {.name = "x", .type = {.dtype = (uint8_t)dtype}};
    for (const char *at = names; *at; at++) {
        char name[2] = {*at, 0};
        in.type.axis[in.type.rank] = axis(p, name);
        in.type.size[in.type.rank] = sizes[in.type.rank];
        in.type.rank++;
    }
    int64_t id = ml_graph_add_input(p->g, &in);
    return ml_graph_add(p->g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

void output(piece *p, ml_ref n) {
    p->outputs[p->output_count++] = n;
}

ml_ref number(piece *p, double value) {
    return ml_const(p->g, ML_F32, value);
}

ml_ref mean(piece *p, ml_ref x, const char *name, double size) {
    ml_axis over = axis(p, name);
    return MUL(ml_reduce(p->g, ML_OP_SUM, x, &over, 1), number(p, 1 / size));
}

ml_ref dot(piece *p, ml_ref a, ml_ref b, const char *name) {
    ml_axis over = axis(p, name);
    return ml_dot(p->g, a, b, &over, 1, (ml_dtype)ml_graph_type(p->g, a)->dtype);
}

ml_ref layer_norm(piece *p, ml_ref x, double size) {
    ml_ref centred = SUB(x, mean(p, x, "e", size));
    ml_ref rstd = FN(RSQRT, ADD(mean(p, MUL(centred, centred), "e", size), number(p, 1e-5)));
    ml_ref gain = input(p, ML_F32, "e", SIZES((int64_t)size));
    return ADD(MUL(MUL(centred, rstd), gain), input(p, ML_F32, "e", SIZES((int64_t)size)));
}

ml_ref gelu(piece *p, ml_ref x) {
    ml_ref inner = MUL(ADD(x, MUL(number(p, 0.044715), MUL(x, MUL(x, x)))), number(p, 0.797885));
    return MUL(MUL(x, number(p, 0.5)), ADD(FN(TANH, inner), number(p, 1)));
}

static void run_piece(void *context) {
    piece *p = context;
    p->g = ml_graph_new();
    p->build(p);
    ml_roots roots = {.outputs = p->outputs, .output_count = p->output_count};
    p->simple = ml_simplify(p->g, &roots);
    p->s = ml_lower(p->simple, &roots, &p->target, p->arena);
    ml_lower_verify(p->s);
    for (uint32_t i = 0; i < p->s->steps.count; i++) {
        const ml_step *step = &p->s->steps.at[i];
        if (step->kind == ML_STEP_KERNEL)
            CHECK(step->kernel != NULL && step->kernel->print != NULL);
        CHECK(step->bytes > 0);
    }
}

void lower_for(piece *p, ml_target_kind kind, void (*build)(void *)) {
    memset(p, 0, sizeof *p);
    p->target = (ml_target){
        .kind = kind, .threads = 2, .vector_bytes = 32, .arch = 90, .multiprocessors = 132};
    p->arena = ml_arena_new();
    p->build = build;
    ml_status status = ml_protect(run_piece, p);
    EXPECT(status == ML_OK, "raised: %s", ml_error_last()->text);
    REQUIRE(status == ML_OK);
}

void lower_piece(piece *p, void (*build)(void *)) {
    lower_for(p, ML_TARGET_C, build);
}

void free_piece(piece *p) {
    ml_graph_free(p->simple);
    ml_graph_free(p->g);
    ml_arena_free(p->arena);
}
