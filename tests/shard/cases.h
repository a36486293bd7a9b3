/* A case for every op that a script can make: the op on operands of 4, 8, ... elements an axis, so
 * that every axis can be cut.
 *
 * Operands are inputs or states as the fixture draws, or, where shard_case_given is set, inputs
 * that lie there (by PLACE): over each mesh axis whole, split along an axis that divides, or a sum
 * over the ranks. */
#ifndef SHARD_CASES_H
#define SHARD_CASES_H

#include "tests/shard/support.h"

enum { GIVEN_OPERANDS = 9, GIVEN_MESH = 2 };
typedef struct {
    int mesh;                               /* mesh axes: "x", "y" */
    int64_t parts;                          /* the ranks of all of them */
    int choice[GIVEN_OPERANDS][GIVEN_MESH]; /* 0: whole, then the axes that divide, then a sum */
    /* Set by the case: */
    int count;                   /* of operands */
    int choices[GIVEN_OPERANDS]; /* how many there are */
    ml_ref placed[GIVEN_OPERANDS];
} shard_given;

extern shard_given *shard_case_given; /* NULL: drawn */
extern ml_dtype shard_case_dtype;     /* of operands that are numbers; f64 where not set */

int shard_case_count(void);
ml_op shard_case_op(int i);
ml_ref shard_case_build(fixture *f, int i);
/* The first case of this op; -1 where there is none. */
int shard_case_find(ml_op op);
/* Where operand k lies over mesh axis m by what is given. */
ml_placement shard_case_place(const fixture *f, int k, int m);
/* The experts of a mixture (no case of its own); its states are the operands. */
ml_ref shard_case_experts(fixture *f);

#endif
