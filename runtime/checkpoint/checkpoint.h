/* Checkpoints: states of a session into a folder, and back under any layout.
 *
 * What is saved are global tensors by name (io/manifest.h), never how they were split. Every byte
 * is written by one rank: ranks that hold the same part of a tensor share its rows. A save takes a
 * snapshot in host memory and returns; threads write it. They speak to the other ranks' through
 * files in the temporary folder alone, so that no collective of a training waits for a disk: each
 * rank has a file `rank-N` there, which it fills with its hashes when its part is durable, and
 * removes when it has failed. Rank 0 then writes the manifest and gives the folder its name; one of
 * that name is replaced at the same moment. Loading reads the ranges that a rank holds into
 * its states and compares the content's hashes among all ranks: until all are right the states have
 * no value, and nothing reads, saves or updates them. */
#ifndef ML_CHECKPOINT_H
#define ML_CHECKPOINT_H

#include "runtime/exec/program.h"
#include "runtime/io/manifest.h"

typedef struct ml_checkpoint_writer ml_checkpoint_writer; /* of one session's saves */
typedef struct {
    uint32_t state;
    const char *name;
} ml_checkpoint_entry;

/* How a save ended. */
typedef struct {
    char path[4096];
    int64_t bytes;         /* that this rank wrote */
    double stall, seconds; /* that the training stood still for the snapshot; until all was done */
    ml_status status;
    bool own; /* of this rank's part, and not as rank 0 saw it */
    char problem[4096], help[1024];
} ml_checkpoint_result;

/* The names of states, for `names` of what follows: all that are saved without a list: of named
 * parameters, optimizer states and others. In the arena. */
ml_status ml_checkpoint_states(ml_session *session, ml_arena *arena,
                               const ml_checkpoint_entry **entries, int *count);

ml_status ml_checkpoint_writer_new(ml_session *session, ml_checkpoint_writer **writer);
void ml_checkpoint_writer_free(ml_checkpoint_writer *writer); /* waits for a save; NULL allowed */
/* All ranks at once, between steps: take the memory that a save will need, on a device that has
 * room for its snapshot, and let go of it where other allocations want it. */
ml_status ml_checkpoint_rehearse(ml_checkpoint_writer *writer, const ml_checkpoint_entry *entries,
                                 int count);
/* All ranks at once, between steps. `record` is a JSON object. A save that is still being written
 * is waited for. What fails here fails on every rank; later failures are results. */
ml_status ml_checkpoint_begin(ml_checkpoint_writer *writer, const char *path, const char *record,
                              const ml_checkpoint_entry *entries, int count);
/* The oldest ended save that was not yet given out; false: none. No rank waits for another: of
 * ranks but the first, the result says that the rank's own part is written. */
bool ml_checkpoint_poll(ml_checkpoint_writer *writer, ml_checkpoint_result *result);
/* All ranks at once: wait for the save under way; the last save's end as rank 0 saw it, or why
 * this rank's part failed. false: there was none, or its result was given out. Fails where another
 * rank has ended. */
ml_status ml_checkpoint_wait(ml_checkpoint_writer *writer, bool *found,
                             ml_checkpoint_result *result);

/* Rank 0 removes a checkpoint, its manifest first, beside the steps: a thread does. Fails with what
 * the removal before could not remove, once that has ended; NULL: only that. */
ml_status ml_checkpoint_remove(ml_checkpoint_writer *writer, const char *path);

/* What a checkpoint lacks of the entries, has beyond them, and has in another shape or dtype:
 * lists of texts, "name" or "name: f32[x=2] here, ..."; in the manifest's arena. */
typedef struct {
    ml_manifest *manifest; /* freed by the caller, also after a failure; or NULL */
    const char **missing, **unexpected, **reshaped;
    int missing_count, unexpected_count, reshaped_count;
} ml_checkpoint_report;
/* All ranks at once. Strict: anything missing or reshaped is an error, and, with `all`, anything
 * unexpected. Else what is there and fits is loaded. After a failure in tensors the states have no
 * value until they are set anew; after others they keep theirs. */
ml_status ml_checkpoint_load(ml_session *session, const char *path,
                             const ml_checkpoint_entry *entries, int count, bool all, bool strict,
                             ml_checkpoint_report *report);

/* All ranks at once: whether ranks that hold the same part of a state hold the same bits. *differs:
 * one does not; the text in `what` names ranks and states. */
ml_status ml_replicas_check(ml_session *session, bool *differs, char what[1024]);

#endif
