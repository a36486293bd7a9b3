/* The order in which a GPU's kernels sum up does not depend on what else they compute. */
#include <stdio.h>
#include <string.h>

#include "tests/lower/support.h"

enum { ROWS = 4096, COLUMNS = 1024 };

typedef struct {
    bool row, column; /* which sums */
    bool writes;      /* elements too, in f32, of which another tensor in f32 is a part */
} sums;

/* `variant`: of lower_for's function, which takes no more than the graph. */
static sums variant;

static void build_sums(void *context) {
    piece *p = context;
    ml_axis r = axis(p, "r"), e = axis(p, "e");
    ml_ref x = ml_cast(p->g, input(p, ML_BF16, "re", SIZES(ROWS, COLUMNS)), ML_F32);
    ml_ref y = variant.writes ? MUL(x, input(p, ML_F32, "re", SIZES(ROWS, COLUMNS))) : x;
    if (variant.row) {
        ml_ref sum = ml_reduce(p->g, ML_OP_SUM, MUL(x, x), &e, 1);
        output(p, variant.writes ? MUL(y, sum) : sum);
    } else if (variant.writes) {
        output(p, y);
    }
    if (variant.column) output(p, ml_reduce(p->g, ML_OP_SUM, x, &r, 1));
}

/* Of the kernel that reads all rows: its teams, their threads, a thread's packs and their elements;
 * whether chunks have rows by turns. */
typedef struct {
    int teams, threads, packs, elements;
    bool by_turns;
} order;

static order order_of(sums which) {
    order found = {0};
    piece p;
    variant = which;
    lower_for(&p, ML_TARGET_CUDA, build_sums);
    for (uint32_t i = 0; i < p.s->steps.count; i++) {
        const ml_step *step = &p.s->steps.at[i];
        if (!step->ir || step->ir->size[0] != ROWS || found.teams > 0) continue;
        ml_text text = {.arena = p.arena};
        ml_kernel_print_schedule(step->kernel, &text);
        const char *blocks = strstr(text.text, "blocks of "), *packs = strstr(text.text, "packs ");
        REQUIRE(blocks && packs);
        CHECK_EQ_INT(sscanf(blocks, "blocks of %d x %d", &found.teams, &found.threads), 2);
        CHECK_EQ_INT(sscanf(packs, "packs %d x %d", &found.packs, &found.elements), 2);
        found.by_turns = strstr(text.text, "by turns") != NULL;
    }
    free_piece(&p);
    return found;
}

TEST(lower, order_of_sums_of_rows) {
    const order alone = order_of((sums){.row = true});
    CHECK(alone.threads > 0);
    for (int i = 1; i < 4; i++) {
        const order beside = order_of((sums){.row = true, .column = i & 1, .writes = i & 2});
        CHECK_EQ_INT(beside.threads, alone.threads);
        CHECK_EQ_INT(beside.packs, alone.packs);
        CHECK_EQ_INT(beside.elements, alone.elements);
    }
}

/* Alone they are by tiles of columns; with sums of rows a block has whole rows. */
TEST(lower, order_of_sums_of_columns) {
    const order alone = order_of((sums){.column = true});
    CHECK(alone.teams > 1 && alone.by_turns);
    for (int i = 1; i < 4; i++) {
        const order beside = order_of((sums){.row = i & 1, .column = true, .writes = i & 2});
        CHECK_EQ_INT(beside.teams, alone.teams);
        CHECK(beside.by_turns);
    }
}
