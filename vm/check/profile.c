/* --profile: which steps of the script are measured, and what is reported of them.
 *
 * A step is one that m.train marks with core.begin_step; in scripts without such marks,
 * a run of a program. The step before the first wanted one runs products and attention alone, the
 * wanted ones run step by step, the two after them as ever: then the trace is written and the table
 * printed, or at the script's end if that is earlier. From then on only the device's share of
 * each step is measured. */
#include "vm/vm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "vm/check/bench.h"

enum { FIRST = 3, LAST = 5, WHOLE_STEPS = 2, MOST_RANKS = 64 /* in one trace */ };

/* ---- The command line ---- */
bool vm_profile_parse_steps(const char *text, vm_options *options) {
    char *end;
    errno = 0;
    options->profile_first = options->profile_last = strtoll(text, &end, 10);
    if (end == text) return false;
    if (*end == ':') {
        const char *rest = end + 1;
        options->profile_last = strtoll(rest, &end, 10);
        if (end == rest) return false;
    }
    return *end == 0 && errno == 0 && options->profile_first >= 2 &&
           options->profile_first <= options->profile_last;
}

bool vm_profile_writable(const char *path) {
    bool existed = access(path, F_OK) == 0;
    FILE *file = fopen(path, "ab");
    if (!file) return false;
    fclose(file);
    if (!existed) unlink(path);
    return true;
}

/* ---- Steps ---- */
static ml_profile *profile_of(const ml_vm *vm) {
    const ml_device *device = ml_session_device(vm->session);
    return vm->options->profile && device ? device->profile : NULL;
}

void vm_profile_attach(lua_State *L) {
    ml_vm *vm = vm_of(L);
    ml_device *device = ml_session_device(vm->session);
    ml_ceilings ceilings = {0};
    if (!vm->options->profile || !device) return;
    if (strcmp(device->ops->name, "null") == 0)
        vm_fail(L, "devices that run are cpu and cuda", "--profile: the device null runs nothing");
    vm_check(L, ml_device_profile(device));
    ml_comm *comm = vm->options->comm;
    if (comm) ml_comm_busy(comm, "measuring the device for --profile");
    if (!comm || ml_comm_rank(comm) == 0)
        vm_check(L, ml_bench(device->ops->name, 0, false, &ceilings));
    if (comm) vm_check(L, ml_comm_share(comm, &ceilings, sizeof ceilings));
    if (comm) ml_comm_done(comm);
    device->profile->ceilings = ceilings;
    device->profile->stores = true;
    vm->profile.first = vm->options->profile_first ? vm->options->profile_first : FIRST;
    vm->profile.last = vm->options->profile_last ? vm->options->profile_last : LAST;
}

/* ---- The report ---- */
typedef struct {
    const ml_vm *vm;
    const ml_profile *profile;
    ml_profile_sums sums;
    ml_text table, json, trace;
} report_call;

static void report_body(void *context) {
    report_call *call = context;
    const ml_vm *vm = call->vm;
    const ml_device *device = ml_session_device(vm->session);
    int rank = vm->options->comm ? ml_comm_rank(vm->options->comm) : 0;
    ml_profile_sum(call->profile, call->table.arena, &call->sums);
    ml_profile_table(call->profile, &call->sums, &call->table);
    ml_profile_json(call->profile, &call->sums, device->description, &call->json);
    ml_profile_trace(call->profile, rank, device->description, ml_session_layout(vm->session),
                     &call->trace);
}

/* "trace.json" of rank 3 is "trace.rank3.json". */
static void rank_path(const char *path, int rank, char *out, size_t size) {
    const char *dot = strrchr(path, '.'), *slash = strrchr(path, '/');
    size_t stem =
        dot && dot != path && (!slash || dot > slash + 1) ? (size_t)(dot - path) : strlen(path);
    snprintf(out, size, "%.*s.rank%d%s", (int)stem, path, rank, path + stem);
}

/* Append the events of a rank's file, which has this module's own form. */
static bool append_events(FILE *to, const char *path) {
    char line[1 << 16];
    bool first = true, good = true;
    FILE *from = fopen(path, "rb");
    if (!from) return true; /* of another host: it stays there, as a trace of its own */
    while (good && fgets(line, sizeof line, from)) {
        if (first || strcmp(line, "]}\n") == 0) {
            if (first) good = fputs(",\n", to) >= 0;
            first = false;
            continue;
        }
        size_t length = strlen(line); /* the last event ends without a comma */
        bool is_last = length > 2 && line[length - 1] == '\n' && line[length - 2] != ',';
        good =
            fwrite(line, 1, is_last ? length - 1 : length, to) == (is_last ? length - 1 : length);
    }
    good = good && !ferror(from);
    fclose(from);
    if (good) unlink(path);
    return good;
}

static bool write_trace(const char *path, const char *events, int ranks) {
    FILE *file = fopen(path, "wb");
    if (!file) return false;
    bool good = fputs(ml_trace_head, file) >= 0 && fputs(events, file) >= 0;
    for (int rank = 1; rank < ranks && good; rank++) {
        char other[4096];
        rank_path(path, rank, other, sizeof other);
        good = append_events(file, other);
    }
    good = good && fputs(ml_trace_tail, file) >= 0;
    return fclose(file) == 0 && good;
}

/* Each rank writes its file; the first one then merges those that it can read into its own. */
static void write_traces(lua_State *L, const char *events) {
    ml_vm *vm = vm_of(L);
    ml_comm *comm = vm->options->comm;
    const char *path = vm->options->profile;
    int ranks = comm ? ml_comm_world(comm) : 1, rank = comm ? ml_comm_rank(comm) : 0;
    if (ranks > MOST_RANKS) ranks = MOST_RANKS;
    char own[4096];
    snprintf(own, sizeof own, "%s", path);
    if (rank > 0) rank_path(path, rank, own, sizeof own);
    if (rank > 0 && rank < ranks && !write_trace(own, events, 1))
        vm_fail(L, NULL, "cannot write %s: %s", own, strerror(errno));
    if (comm) vm_check(L, ml_comm_barrier(comm));
    if (rank == 0 && !write_trace(path, events, ranks))
        vm_fail(L, NULL, "cannot write %s: %s", path, strerror(errno));
}

static int report_texts(lua_State *L) {
    report_call *call = lua_touserdata(L, 1);
    ml_vm *vm = vm_of(L);
    vm_protect(L, report_body, call);
    write_traces(L, call->trace.text);
    if (vm->options->comm && ml_comm_rank(vm->options->comm) > 0) return 0;
    if (vm->options->json) fputs(call->json.text, vm->options->json_out);
    if (vm->options->quiet) return 0;
    if (isatty(STDERR_FILENO)) fputs("\n", stderr); /* below a progress bar */
    fprintf(stderr, "%sthe trace is in %s: https://ui.perfetto.dev opens it\n", call->table.text,
            vm->options->profile);
    return 0;
}

static void report(lua_State *L) {
    ml_vm *vm = vm_of(L);
    ml_profile *profile = profile_of(vm);
    ml_arena *arena = ml_arena_new();
    if (!arena) vm_fail(L, NULL, "not enough host memory for a profile");
    report_call call = {.vm = vm, .profile = profile};
    call.table.arena = call.json.arena = call.trace.arena = arena;
    vm->profile.reported = true;
    profile->stores = false;
    lua_pushcfunction(L, report_texts);
    lua_pushlightuserdata(L, &call);
    int result = lua_pcall(L, 1, 0, 0);
    ml_arena_free(arena);
    if (result != LUA_OK) lua_error(L);
}

/* ---- Steps ---- */
static ml_run_mode mode_of(const vm_profile *p, int64_t step) {
    if (p->reported || step < p->first - 1 || step > p->last) return ML_RUN_WHOLE;
    return step < p->first ? ML_RUN_ALONE : ML_RUN_STEPS;
}

static void end_step(lua_State *L, ml_profile *profile) {
    ml_device *device = ml_session_device(vm_of(L)->session);
    vm_check(L, device->ops->wait(device)); /* the profile receives the times of its runs */
    ml_profile_end_step(profile);
}

static void begin_step(lua_State *L, ml_profile *profile, int64_t step) {
    vm_profile *p = &vm_of(L)->profile;
    end_step(L, profile);
    p->step = step;
    if (!p->reported && step > p->last + WHOLE_STEPS) report(L);
    vm_check(L, ml_profile_begin_step(profile, step, mode_of(p, step)));
}

void vm_profile_run(lua_State *L) {
    ml_vm *vm = vm_of(L);
    ml_profile *profile = profile_of(vm);
    if (profile && !vm->profile.marked) begin_step(L, profile, vm->profile.step + 1);
}

double vm_profile_clock(lua_State *L) {
    return profile_of(vm_of(L)) ? ml_clock_now() : 0;
}

void vm_profile_span(lua_State *L, const char *what, double begin) {
    ml_profile *profile = profile_of(vm_of(L));
    if (profile) vm_check(L, ml_profile_host(profile, what, begin));
}

/* The wanted steps must be among those of the training; the default ones are moved there. */
static void fit_steps(lua_State *L, int64_t steps) {
    vm_profile *p = &vm_of(L)->profile;
    if (steps < 2)
        vm_fail(L, "train for 2 steps or more: the first makes everything ready",
                "--profile: the training makes one step only");
    if (p->last > steps && vm_of(L)->options->profile_first)
        vm_fail(L, "steps=... trains longer; --profile-steps=A:B chooses others",
                "--profile-steps=%lld:%lld: the training makes %lld steps", (long long)p->first,
                (long long)p->last, (long long)steps);
    if (p->last > steps) p->last = steps;
    if (p->first > p->last) p->first = p->last;
}

static int core_begin_step(lua_State *L) {
    ml_vm *vm = vm_of(L);
    ml_profile *profile = profile_of(vm);
    if (!profile) return 0;
    vm->profile.marked = true;
    if (lua_isnoneornil(L, 1)) {
        end_step(L, profile);
        return 0;
    }
    int64_t step = vm_integer(L, 1, "the step");
    if (!vm->profile.reported && !lua_isnoneornil(L, 2) && step == 1)
        fit_steps(L, vm_integer(L, 2, "the number of steps"));
    begin_step(L, profile, step);
    return 0;
}

void vm_profile_finish(lua_State *L) {
    ml_vm *vm = vm_of(L);
    ml_profile *profile = profile_of(vm);
    if (!vm->options->profile || vm->profile.reported) return;
    if (profile) end_step(L, profile);
    bool measured = profile && vm->profile.step >= vm->profile.first;
    if (!measured && vm_stop) return; /* interrupted */
    if (!measured)
        vm_fail(L,
                "a step is one of m.train's or, without it, a run of a program; "
                "--profile-steps=A:B chooses others",
                "--profile: the script ended before step %lld: nothing was measured",
                (long long)(profile ? vm->profile.first : FIRST));
    report(L);
}

static const vm_entry functions[] = {
    {"begin_step", core_begin_step, "step?: integer, steps?: integer",
     "a training step begins, of so many; without arguments: the last one is over. For --profile"},
    {0}};

void vm_profile_register(lua_State *L) {
    vm_register(L, functions);
}
