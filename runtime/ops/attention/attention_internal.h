/* Inside of attention: what its interfaces (interface.c) are made of. */
#ifndef ML_ATTENTION_INTERNAL_H
#define ML_ATTENTION_INTERNAL_H

#include "runtime/ops/attention/attention.h"

struct ml_placements;
struct sharder;
struct tape;

void attention_infer(struct infer *in, ml_type *out);                           /* attention.c */
void attention_gradient(struct tape *t, ml_ref n, const ml_ref *cotangents); /* gradient.c */
void attention_propose(struct sharder *s, ml_ref n);                            /* shard_rules.c */
void attention_local(struct sharder *s, ml_ref n, const ml_ref *sources,
                     const struct ml_placements *need, const struct ml_placements *out,
                     ml_ref *outputs); /* shard_local.c */

#endif
