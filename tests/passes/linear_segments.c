/* Linear scans with few rows as segments that run side by side: results, final states and gradients
 * are those of the whole, with and without low rank, in both directions. */
#include "runtime/ops/linear_scan/linear_scan.h"
#include "tests/passes/support.h"

typedef struct {
    const char *axes[LINEAR_SCAN_MOST_SOURCES];
    int rank;
    bool after, reverse;
} segmented;
static const segmented cases[] = {
    {{"b2 s12 k2", "k2 s12", "b2 s12 v2", "s12", "k2 b2 v2"}, 0, true, false},
    {{"s12 k2", "s12 k2", "s12 v3", "s12 k2", "v3 k2", "s12 k2", "s12 k2"}, 1, true, true},
    {{"b2 s18 k2", "s18 k2", "s18 v2", "b2 s18", "b2 k2 v2", "k2 s18", "b2 s18 k2"},
     1,
     false,
     false},
};

static void check(fixture *f, const segmented *c) {
    enum { RESULTS = 2 };
    const int count = LINEAR_SCAN_FIRST_PAIR + 2 * c->rank;
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES], nodes[RESULTS + LINEAR_SCAN_MOST_SOURCES];
    for (int i = 0; i < count; i++) sources[i] = fixture_input(f, ML_F64, c->axes[i], 0.3, 0.9);
    nodes[0] = fixture_linear_scan(f, sources, c->rank, c->after, c->reverse);
    nodes[1] = ml_out(f->g, nodes[0], 1);
    const ml_ref loss =
        ml_map2(f->g, ML_OP_ADD, fixture_loss(f, nodes[0]), fixture_loss(f, nodes[1]));
    ml_autodiff(f->g, loss, sources, count, nodes + RESULTS);
    fixture_check_pass(f, "segment_linear_scans", nodes, RESULTS + count, 1e-9);
}

static void check_all(fixture *f) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check(f, &cases[i]);
}

TEST(passes, segments_of_linear_scans) {
    fixture_run(check_all, 1);
}
