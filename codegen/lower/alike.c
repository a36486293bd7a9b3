/* Groups that are alike: those of a model's layers, of which there may be a thousand. What a kernel
 * follows from is written out as words. Of a root alone: its expression down to what is in memory,
 * whose nodes are numbered in the order in which they are met (fuse_space.c). Of two kernels that
 * meet: their shapes, and which nodes are the same (fuse_join.c). Of a whole kernel: its shape, and
 * where its nodes are in memory (kernel.c). Equal words are equal instructions, operands and costs,
 * with other nodes behind the numbers. So each is made once, and for others that are alike only
 * nodes and values are found.
 *
 * A node is described by its op, type and arguments; one in memory by where it is there instead of
 * by how it is computed. Its number is the same wherever it is met again, and so is that of the
 * node in whose memory it is. */
#include <string.h>

#include "codegen/lower/lower_internal.h"

void alike_word(lowering *l, uint64_t word) {
    *ML_PUSH(l->scratch, &l->words) = word;
}

static void add_words(lowering *l, const void *from, size_t bytes) {
    uint64_t word;
    for (size_t at = 0; at + sizeof word <= bytes; at += sizeof word) {
        memcpy(&word, (const char *)from + at, sizeof word);
        alike_word(l, word);
    }
}

static void add_type(lowering *l, const ml_type *type) {
    alike_word(l, (uint64_t)type->dtype << 8 | type->rank);
    for (int i = 0; i < type->rank; i++) alike_word(l, type->axis[i]);
    add_words(l, type->size, sizeof *type->size * type->rank);
}

void alike_begin(lowering *l) {
    for (uint32_t i = 0; i < l->numbered.count; i++) l->number[l->numbered.at[i]] = 0;
    l->numbered.count = l->words.count = 0;
}

/* Whether the node is met for the first time. */
static bool add_number(lowering *l, ml_ref n) {
    bool first = l->number[n] == 0;
    if (first) {
        *ML_PUSH(l->scratch, &l->numbered) = n;
        l->number[n] = l->numbered.count;
    }
    alike_word(l, l->number[n]);
    return first;
}

static void add_place(lowering *l, ml_ref n) {
    alike_word(l, l->info[n].layout != 0);
    if (l->info[n].layout == 0) return;
    const lower_layout *layout = &l->layouts.at[l->info[n].layout];
    if (add_number(l, layout->holder)) alike_word(l, ml_graph_node(l->g, layout->holder)->type);
    alike_word(l, (uint64_t)layout->offset);
    add_words(l, layout->stride, sizeof *layout->stride * ml_graph_type(l->g, n)->rank);
}

static void add_node(lowering *l, ml_ref n, bool computed) {
    const ml_node *node = ml_graph_node(l->g, n);
    if (!add_number(l, n)) return;
    bool memory = !computed && lower_in_memory(l, n) && node->op != ML_OP_CONST;
    alike_word(l, (uint64_t)node->type << 2 | (uint64_t)computed << 1 | memory);
    if (memory || computed) add_place(l, n);
    if (memory) return;
    alike_word(l, (uint64_t)node->op << 32 | (uint64_t)node->source_count << 16 | node->arg_count);
    add_words(l, ml_graph_args(l->g, n), sizeof(int64_t) * node->arg_count);
    for (int i = 0; i < node->source_count; i++) add_node(l, ml_graph_source(l->g, n, i), false);
}

void alike_root(lowering *l, const lower_root *root) {
    const ml_node *node = ml_graph_node(l->g, root->node);
    alike_word(l, (uint64_t)root->kind << 48 | (uint64_t)root->scope << 40 |
                      (uint64_t)root->phase << 32 | (uint32_t)root->part);
    add_type(l, &root->space);
    alike_word(l, l->info[root->node].stored);
    if (root->kind != LOWER_ROOT_PART && root->kind != LOWER_ROOT_FINISH) {
        add_node(l, root->node, root->kind != LOWER_ROOT_PACK);
        return;
    }
    /* Of these the node's operands are not computed, or one of them is. */
    if (add_number(l, root->node)) add_place(l, root->node);
    alike_word(l, (uint64_t)node->op << 32 | node->type);
    if (root->kind == LOWER_ROOT_FINISH) return;
    add_words(l, ml_graph_args(l->g, root->node), sizeof(int64_t) * node->arg_count);
    for (int i = 0; i < root->part; i++)
        alike_word(l, ml_graph_node(l->g, ml_graph_source(l->g, root->node, i))->type);
    add_node(l, ml_graph_source(l->g, root->node, root->part), false);
}

/* What the chunks of a reduction have left, where that has a place already. */
static void add_partial(lowering *l, ml_ref n) {
    uint32_t id = l->info[n].partial_value;
    alike_word(l, id != LOWER_NONE);
    if (id == LOWER_NONE) return;
    const ml_value *value = &l->s->values.at[id];
    add_type(l, &value->type);
    add_words(l, value->stride, sizeof *value->stride * value->type.rank);
}

/* A kernel's loops, and the expressions of its roots, are of its shape (fuse_join.c); what is left
 * is which nodes are the same, and where they are in memory. */
void alike_kernel(lowering *l, const lower_group *group) {
    alike_begin(l);
    alike_word(l, (uint64_t)group->shape << 32 | group->accesses.count);
    alike_word(l, (uint64_t)group->chunks);
    for (uint32_t r = 0; r < group->roots.count; r++) {
        const ml_ref n = group->roots.at[r].node;
        alike_word(l, l->info[n].stored);
        if (add_number(l, n)) add_place(l, n);
    }
    for (uint32_t a = 0; a < group->accesses.count; a++) {
        const lower_access *access = &group->accesses.at[a];
        bool first = add_number(l, access->node);
        if (access->partial)
            add_partial(l, access->node);
        else if (first)
            add_place(l, access->node);
    }
}

static uint64_t words_hash(const lowering *l) {
    return ml_hash(l->words.at, sizeof *l->words.at * l->words.count, 0);
}

void *alike_find(const lowering *l, const lower_alike *known) {
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&known->index, words_hash(l), &cursor)) != ML_INDEX_NONE) {
        const lower_alike_entry *entry = &known->entries.at[found];
        if (entry->count == l->words.count &&
            memcmp(entry->words, l->words.at, sizeof *entry->words * entry->count) == 0)
            return entry->result;
    }
    return NULL;
}

void alike_add(lowering *l, lower_alike *known, void *result) {
    lower_alike_entry *entry = ML_PUSH(l->scratch, &known->entries);
    const size_t bytes = sizeof *l->words.at * l->words.count;
    *entry = (lower_alike_entry){.result = result, .count = l->words.count};
    uint64_t *words = ml_arena_alloc(l->scratch, bytes);
    memcpy(words, l->words.at, bytes);
    entry->words = words;
    known->index.arena = l->scratch;
    ml_index_add(&known->index, words_hash(l), known->entries.count - 1);
}
