/* Whether a loss is a sum over sequences, each for itself: whatever rows these are packed into, in
 * whatever order, the sum is the same (layout cp = "dynamic").
 *
 * It is where every value over the axis `seq` is computed position by position, by attention that
 * the documents bound or by what keeps documents apart itself (`apart`), sums over positions go
 * through linear ops alone, and nothing depends on the place of a position in its row. */
#ifndef ML_BY_SEQUENCE_H
#define ML_BY_SEQUENCE_H

#include "runtime/graph/graph.h"

typedef struct {
    ml_ref node; /* 0: the roots are sums over sequences */
    const char *why;
} ml_across_sequences;

/* Nodes [first, end) that join positions of one document alone: a convolution of documents, a scan
 * that begins anew in each. */
typedef struct {
    ml_ref first, end;
} ml_apart;

/* documents: the input over batch and seq that numbers the sequences of each row. Raises only where
 * memory is short. */
ml_across_sequences ml_find_across_sequences(const ml_graph *g, const ml_ref *roots, int count,
                                             ml_axis batch, ml_axis seq, ml_ref documents,
                                             const ml_apart *apart, int apart_count);

/* What computes otherwise in the one of two traces of a loss than in the other, of rows of two
 * lengths: with another number, or another op; 0: nothing does, but for nodes that keep documents
 * apart, which have numbers of their own for their pieces. Raises only where memory is short. */
ml_ref ml_find_by_length(const ml_graph *g, const ml_ref *one, const ml_ref *other, int count,
                         const ml_apart *apart, int apart_count);

/* Whether an attention, or a gradient of one, lets a query see the keys alone that have the same
 * number: m.attention's `document`. */
bool ml_attention_by_document(const ml_graph *g, ml_ref n);

#endif
