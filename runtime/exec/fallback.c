/* A program that bounds what ranks exchange (layout.h) has another one behind it, of the same roots
 * under the same layout without the bound: where rows find no place, the step has changed no state,
 * and the other program does it again from the inputs that are still on the device. Its memory is
 * reserved with the first one's; its kernels are compiled when it is first needed. After a step
 * that was done again some go to the other program at once, twice as many after each failure in a
 * row. */
#include <math.h>
#include <stdio.h>

#include "runtime/exec/session.h"

/* ---- making ---- */
/* It reads the inputs of the other. */
static ml_status share_inputs(ml_program *spare, const ml_program *program) {
    for (int i = 0; i < spare->input_count; i++) {
        int at = 0;
        while (at < program->input_count && program->input_ids[at] != spare->input_ids[i]) at++;
        if (at == program->input_count || program->input_bytes[at] != spare->input_bytes[i])
            return ml_fail(ML_INTERNAL, "a program and its fallback differ in their inputs");
        spare->input_offsets[i] = program->input_offsets[at];
    }
    spare->inputs = program->inputs;
    spare->coordinates = program->coordinates;
    return ML_OK;
}

/* Without memory for it there is none, and a step that needs it fails. */
ml_status fallback_make(ml_program *program, const ml_roots *roots) {
    ml_session *session = program->session;
    if (program->plan->roots.watched == 0) return ML_OK;
    session->unbounded = session->layout;
    session->unbounded.exchange = 0;
    ml_program *spare = ml_alloc(sizeof *spare);
    if (spare == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while making a program");
    program_enter(session, spare);
    spare->owner = program;
    program->fallback = spare;
    ml_status status = session_plan(session, roots, &session->unbounded, false, &spare->plan);
    if (status == ML_OK) status = program_reserve(spare);
    if (status == ML_OK) status = share_inputs(spare, program);
    bool absent = status == ML_NO_MEMORY || status == ML_TOO_LARGE;
    if (status != ML_OK && !absent) return status;
    int64_t made = !absent; /* all ranks have one, or none has */
    status = session->world != NULL ? ml_comm_least(session->comm, &made) : ML_OK;
    if (!made) ml_program_free(spare);
    return status;
}

/* ---- running ---- */
enum { LONGEST_PAUSE = 64 };

bool fallback_goes(ml_program *program) {
    program->went = program->waits > 0;
    if (program->went) program->waits--;
    return program->went;
}

/* The factor that would have done for the first exchange that did not fit, *origin; 0 where all
 * did. What comes after it has NaN to route. */
static ml_status factor_of(ml_program *program, double *factor, const ml_origin **origin) {
    const ml_roots *roots = &program->plan->roots;
    float *factors = ml_alloc((size_t)roots->watched * sizeof *factors);
    if (factors == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading an output");
    ml_status status = program_download(program, roots->output_count - 1, factors);
    *factor = 0;
    for (int i = roots->watched; i-- > 0 && status == ML_OK;) {
        if (!(factors[i] > 0)) continue;
        *factor = factors[i];
        *origin = roots->watched_origins[i];
    }
    ml_free(factors);
    return status;
}

static void describe(const ml_program *program, double factor, const ml_origin *origin, char *text,
                     size_t size) {
    snprintf(text, size,
             "%s (%s:%d) sends one rank %.2f times an even share of its rows, and the layout has "
             "places for %g times",
             origin->module != NULL && *origin->module ? origin->module : "a product by groups",
             origin->file != NULL ? origin->file : "?", origin->line, factor,
             program->plan->layout->exchange);
}

static double enough(double factor) {
    return ceil(factor * 11) / 10; /* a tenth more than this step needed */
}

static ml_status run_again(ml_program *program, const char *text, double factor) {
    ml_session *session = program->session;
    ml_program *spare = program->fallback;
    if (spare->executable == NULL) {
        if (session->ranks.rank == 0)
            fprintf(stderr,
                    "mlua: %s; such steps are done again with gathered weights, which "
                    "exchange = %.1f would save\n",
                    text, enough(factor));
        ml_status status = program_compile(spare);
        if (status != ML_OK) return status;
    }
    program->pause = program->pause == 0 ? 1 : 2 * program->pause;
    if (program->pause > LONGEST_PAUSE) program->pause = LONGEST_PAUSE;
    program->waits = program->pause;
    return program_execute(spare);
}

ml_status fallback_settle(ml_program *program, ml_program **done) {
    double factor;
    const ml_origin *origin = NULL;
    char text[512];
    *done = program;
    if (program->plan->roots.watched == 0) return ML_OK;
    if (program->went) {
        *done = program->fallback;
        return ML_OK;
    }
    ml_status status = factor_of(program, &factor, &origin);
    if (status == ML_OK && !(factor > 0)) program->pause = 0;
    if (status != ML_OK || !(factor > 0)) return status;
    describe(program, factor, origin, text, sizeof text);
    if (program->fallback != NULL) {
        *done = program->fallback;
        return run_again(program, text, factor);
    }
    ml_fail(ML_INVALID, "%s", text);
    return ml_help("exchange = %.1f in the layout, or none: then weights are gathered, and no "
                   "load is too uneven",
                   enough(factor));
}
