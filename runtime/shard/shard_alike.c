/* Memoizes the choice of strategies, as layers repeat. What the choice for an op of the core
 * depends on is written out as words (`describe`): the node, and of each source its type, its use
 * and where its versions are. The cuts that were chosen for equal words are taken again. Ops with
 * rules of their own may look further into the graph, and so do strategies for rows of groups
 * (ML_OWNED, ML_SENT): these are chosen for each node. */
#include <string.h>

#include "runtime/shard/shard_internal.h"

enum { MOST_SOURCES = 8 };

typedef struct {
    uint32_t words, word_count, places; /* places: of the sources, then of the results */
} choice;

struct shard_choices {
    ml_index index;
    ML_VEC(choice) list;
    ML_VEC(uint64_t) words;
    ML_VEC(ml_placements) places;
    ML_VEC(uint64_t) wanted; /* of the node at hand */
    bool known;              /* these are all that its choice depends on */
};

static void add_word(sharder *s, uint64_t word) {
    *ML_PUSH(s->scratch, &s->choices->wanted) = word;
}

static void describe_version(sharder *s, const shard_version *version) {
    uint64_t words[sizeof version->at / sizeof(uint64_t)];
    for (int i = 0; i < s->layout->count; i++) {
        int kind = version->at.over[i].kind;
        if (kind == ML_OWNED || kind == ML_SENT) s->choices->known = false;
    }
    memcpy(words, &version->at, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) add_word(s, words[i]);
    add_word(s, 4u | (version->gathered ? 2u : 0u) | (version->backward ? 1u : 0u));
}

static void describe_source(sharder *s, ml_ref n) {
    for (;; n = ml_graph_source(s->from, n, 0)) {
        const shard_value *value = &s->values[n];
        const ml_node *node = ml_graph_node(s->from, n);
        double number = 1;
        uint64_t zero = ml_graph_constant(s->from, n, &number) && number == 0;
        uint64_t backward = (node->flags & ML_NODE_BACKWARD) != 0;
        add_word(s, (uint64_t)node->type << 8 | zero << 4 | backward << 3 |
                        (uint64_t)(value->users == 1) << 2 | (uint64_t)value->free << 1 |
                        value->repeats);
        for (uint32_t v = value->versions; v; v = s->versions.at[v].next)
            describe_version(s, &s->versions.at[v]);
        add_word(s, 0); /* the end of the versions */
        if (!value->repeats) return;
    }
}

static void describe(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    const int64_t *args = ml_graph_args(s->from, n);
    s->choices->wanted.count = 0;
    s->choices->known = !ml_op_interfaces[node->op] && node->source_count <= MOST_SOURCES;
    if (!s->choices->known) return;
    add_word(s, (uint64_t)node->op << 32 | (uint64_t)node->source_count << 16 | node->arg_count);
    add_word(s, (uint64_t)node->type << 3 | (uint64_t)s->backward << 2 |
                    (uint64_t)s->values[n].params << 1 | s->values[n].added);
    for (int i = 0; i < node->arg_count; i++) add_word(s, (uint64_t)args[i]);
    for (int k = 0; k < node->source_count; k++) describe_source(s, ml_graph_source(s->from, n, k));
}

static bool same_words(const struct shard_choices *c, const choice *known) {
    return known->word_count == c->wanted.count &&
           memcmp(c->words.at + known->words, c->wanted.at,
                  sizeof *c->words.at * known->word_count) == 0;
}

static uint64_t wanted_hash(const struct shard_choices *c) {
    return ml_hash(c->wanted.at, sizeof *c->wanted.at * c->wanted.count, 0);
}

bool shard_chosen(sharder *s, ml_ref n, ml_placements *need, ml_placements *out) {
    if (s->choices == NULL) {
        s->choices = ML_NEW(s->scratch, struct shard_choices);
        s->choices->index.arena = s->scratch;
    }
    struct shard_choices *c = s->choices;
    const int sources = ml_graph_node(s->from, n)->source_count;
    describe(s, n);
    if (!c->known) return false;
    uint32_t cursor = 0, found;
    const uint64_t hash = wanted_hash(c);
    do found = ml_index_next(&c->index, hash, &cursor);
    while (found != ML_INDEX_NONE && !same_words(c, &c->list.at[found]));
    if (found == ML_INDEX_NONE) return false;
    const ml_placements *places = c->places.at + c->list.at[found].places;
    for (int k = 0; k < sources; k++) need[k] = places[k];
    for (int i = 0; i < ml_op_outputs(s->from, n); i++) out[i] = places[sources + i];
    return true;
}

void shard_note_choice(sharder *s, ml_ref n, const ml_placements *need, const ml_placements *out) {
    struct shard_choices *c = s->choices;
    if (!c->known) return;
    *ML_PUSH(s->scratch, &c->list) = (choice){c->words.count, c->wanted.count, c->places.count};
    for (uint32_t i = 0; i < c->wanted.count; i++)
        *ML_PUSH(s->scratch, &c->words) = c->wanted.at[i];
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        *ML_PUSH(s->scratch, &c->places) = need[k];
    for (int i = 0; i < ml_op_outputs(s->from, n); i++) *ML_PUSH(s->scratch, &c->places) = out[i];
    ml_index_add(&c->index, wanted_hash(c), c->list.count - 1);
}
