/* Sessions and programs: what the host (vm/) sees of the runtime.
 *
 * A session owns the session graph, a device and the memory of all states. A program is a compiled
 * set of roots. States are allocated when the first program that uses them is loaded, and
 * initialized (by a program over their initial values) before the first run. The temporaries'
 * arena is shared by all programs of the session and as large as the largest needs. */
#ifndef ML_PROGRAM_H
#define ML_PROGRAM_H

#include "runtime/compile.h"
#include "runtime/device/device.h"

/* What the environment asks of the compiler, and of code generation for `target`: read where
 * a device is opened or programs are planned without one. */
ml_compile_options ml_compile_options_read(void);
void ml_target_set_options(ml_target *target);

typedef struct ml_session ml_session;
typedef struct ml_program ml_program;

ml_status ml_session_new(ml_session **session); /* no device yet */
void ml_session_free(ml_session *session);
ml_graph *ml_session_graph(ml_session *session);
/* Open the device on first need; name NULL is the default. Once. On several ranks all at once, and
 * the ordinal is the rank's place on its host. */
ml_status ml_session_open(ml_session *session, const char *device, int ordinal);
ml_device *ml_session_device(ml_session *session); /* NULL before */
void ml_session_set_seed(ml_session *session, int64_t seed);
/* A budget for all memory of a rank's device that is in use, that of its context and libraries
 * included; before the device is opened. 0: what the device has. */
void ml_session_set_memory(ml_session *session, int64_t bytes);
int64_t ml_session_seed(const ml_session *session);

/* On several ranks: `comm` joins them and outlives the session. Every rank then makes the same
 * calls in the same order. Before the first program. */
void ml_session_join(ml_session *session, ml_comm *comm);
/* The layout of all programs and states of the session; once (again with an equal one does
 * nothing). plan_only: for any number of ranks, of which none runs. */
ml_status ml_session_lay_out(ml_session *session, const ml_layout *layout, bool plan_only);
/* Before the layout: which groups of ranks may run programs by themselves (shard/groups.h). */
void ml_session_set_groups(ml_session *session, const ml_groups *groups);
const ml_groups *ml_session_groups(const ml_session *session);
/* Programs that follow are of groups of `size` ranks; 0: of all ranks. Their microbatches are of
 * steps of `lead` (NULL: their own): roots.mixed of both. */
ml_status ml_session_use_groups(ml_session *session, int64_t size, ml_program *lead);
/* Programs that follow apply sums of gradients of these microbatches, whose plans are there until
 * it is called again: they write their parameter cache with the parameters. */
void ml_session_applies(ml_session *session, ml_plan_list microbatches);
const ml_layout *ml_session_layout(const ml_session *session); /* NULL: one rank */
/* All ranks at once, between two steps: *stop becomes the largest of all ranks. */
ml_status ml_session_step(ml_session *session, int64_t *stop);

/* Record how the programs that follow are compiled (runtime/plan/log.h); NULL: no longer. */
void ml_session_log(ml_session *session, ml_compile_log *log);
/* Plan only (for `mlua check`): no device memory, no kernels compiled. `others`: of the programs
 * that there are already; where these are of all pipeline stages, their memory is accounted for
 * anew, stage by stage. */
typedef struct {
    ml_plan *const *at;
    int count;
} ml_plans;
ml_status ml_session_plan(ml_session *session, const ml_roots *roots, const ml_target *target,
                          const ml_plans *others, ml_plan **plan);
/* The plan of a program that is not made: without a retry. `others` NULL: beside the session's. */
ml_status ml_session_plan_alone(ml_session *session, const ml_roots *roots, const ml_target *target,
                                const ml_plans *others, ml_plan **plan);
/* What planning alone leaves out: the source of its kernels, where that is asked for. */
ml_status ml_session_show(ml_plan *plan);
ml_status ml_program_new(ml_session *session, const ml_roots *roots, ml_program **program);
/* Kernels of several programs, compiled all at once: of those that are made while `together` is on.
 * ml_session_compile turns it off; a start of a program that waits for it calls it. */
void ml_session_together(ml_session *session, bool on);
ml_status ml_session_compile(ml_session *session);
void ml_program_free(ml_program *program);
const ml_plan *ml_program_plan(const ml_program *program);
const ml_plan *ml_program_retry(const ml_program *program); /* its retry's plan; NULL: none */
/* The share of a step in which the ranks of a pipeline wait for one another, measured in its
 * seventh to ninth step; negative before, and where there is no pipeline. *forecast becomes what
 * the schedule comes to with the times of tasks and messages in the three before (the planned one,
 * should those not have been taken); plan->pipeline has what was planned, when only their work was
 * known. */
double ml_program_bubble(const ml_program *program, double *forecast);
/* Inputs and outputs are whole tensors on every rank. inputs[i] is the host memory of program input
 * i (by position in ml_program_inputs); outputs[i] receives output i, in the type's order, or is
 * NULL. Waits only if an output is asked for. */
int ml_program_inputs(const ml_program *program,
                      uint32_t *ids); /* input ids of the graph, in order */
/* Which rows along its first axis this rank reads of an input; none where it does not read it. */
ml_status ml_program_own_rows(const ml_program *program, uint32_t input, int64_t *first,
                              int64_t *held);
ml_status ml_program_run(ml_program *program, const void *const *inputs, void *const *outputs);
/* The two halves of a run: start returns once the work is enqueued (the inputs may then be reused);
 * finish reads the outputs. They lie in the shared arena, so no other program may run between. */
ml_status ml_program_start(ml_program *program, const void *const *inputs);
ml_status ml_program_finish(ml_program *program, void *const *outputs);
/* Of a program of groups: what all ranks gather for it at once, where that is stale. All ranks call
 * it with the same programs in the same order, before one of them runs after an update. */
ml_status ml_program_refresh(ml_program *program);
/* Of roots.mixed under pipeline stages: the next steps have so many microbatches, each of the
 * program that is started; all ranks alike. */
ml_status ml_program_microbatches(ml_program *program, int microbatches);

/* Whether a state holds its initial or a later value already. */
bool ml_session_has_value(const ml_session *session, uint32_t state);
/* A state's whole value, in its type's order; on several ranks all at once. Initializes all states
 * first where needed. */
ml_status ml_session_read_state(ml_session *session, uint32_t state, void *to);
/* The state's own memory, valid until something is run or assigned; NULL where this rank has not
 * all of it or the host cannot read it. */
ml_status ml_session_state_memory(ml_session *session, uint32_t state, const void **memory);
ml_status ml_session_write_state(ml_session *session, uint32_t state, const void *from);
/* Give states their initial values, whatever value they have. */
ml_status ml_session_initialize_states(ml_session *session, const uint32_t *states, uint32_t count);
/* Free the memory of a state; what reads it fails from then on. false, and nothing is done, where a
 * program reads it or it has no memory. */
bool ml_session_free_state(ml_session *session, uint32_t state);

#endif
