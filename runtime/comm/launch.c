/* How this process was started: what launchers leave in the environment. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "runtime/base/knobs.h"
#include "runtime/base/pool.h"
#include "runtime/comm/comm.h"

enum { FIRST_PORT = 20000, PORTS = 20000, TORCH_PORT = 29500 };

/* The first of the named variables that is set and not empty; NULL where none is. */
static const char *first_set(const char *const *names) {
    for (; *names; names++) {
        const char *value = getenv(*names);
        if (value && *value) return *names;
    }
    return NULL;
}

static const char *variable(const char *const *names) {
    const char *name = first_set(names);
    return name ? getenv(name) : NULL;
}
#define NAMES(...) ((const char *const[]){__VA_ARGS__, NULL})
#define VARIABLE(...) variable(NAMES(__VA_ARGS__))

/* The number of the first that is set. What is not a number is -1, and stored for ml_comm_open,
 * which refuses it. */
static int number(ml_launch *launch, int otherwise, const char *const *names) {
    const char *name = first_set(names);
    if (!name) return otherwise;
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (isdigit((unsigned char)*text) && !*end && !errno && value <= 1 << 30) return (int)value;
    if (!launch->wrong[0]) snprintf(launch->wrong, sizeof launch->wrong, "%s=%.40s", name, text);
    return -1;
}
#define NUMBER(otherwise, ...) number(launch, otherwise, NAMES(__VA_ARGS__))

static int port_of(const char *job) {
    return FIRST_PORT + (int)(ml_hash(job, strlen(job), 0) % PORTS);
}

/* MASTER_PORT, or else this one. */
static int master_port(ml_launch *launch, int otherwise) {
    launch->fixed_port = VARIABLE("MASTER_PORT") != NULL;
    return NUMBER(otherwise, "MASTER_PORT");
}

static void set_address(ml_launch *launch, const char *host, int port) {
    if (!host) return;
    snprintf(launch->address, sizeof launch->address,
             strchr(host, ':') ? "[%.200s]:%d" : "%.200s:%d", host, port);
}

static void set_job(ml_launch *launch, const char *source, const char *a, const char *b,
                    const char *c) {
    snprintf(launch->source, sizeof launch->source, "%s", source);
    snprintf(launch->job, sizeof launch->job, "%s:%.40s:%.40s:%.20s", source, a ? a : "",
             b ? b : "", c ? c : "");
}

/* The first host of a Slurm list: "gpu[003-010,012],cpu1" begins with gpu003. */
static void first_host(const char *list, char *host, size_t size) {
    size_t used = 0;
    while (*list && *list != ',' && used + 1 < size) {
        if (*list != '[') {
            host[used++] = *list++;
            continue;
        }
        for (list++; *list && !strchr("-,]", *list) && used + 1 < size;) host[used++] = *list++;
        list += strcspn(list, "]");
        if (*list) list++;
    }
    host[used] = 0;
}

/* The ranks of a host share its cores, where no launcher has bound each to some of its own. Before
 * the knobs are read. */
static void share_cores(int ranks) {
    char text[32];
    const char *threads = VARIABLE("MLUA_THREADS");
    int cores = ml_cpu_count();
    if (threads || ranks <= 1 || cores < sysconf(_SC_NPROCESSORS_ONLN)) return;
    snprintf(text, sizeof text, "%d", cores > ranks ? cores / ranks : 1);
    setenv("MLUA_THREADS", text, 1);
}

static bool from_torchrun(ml_launch *launch) {
    const char *rank = VARIABLE("RANK"), *world = VARIABLE("WORLD_SIZE");
    const char *host = VARIABLE("MASTER_ADDR"), *port = VARIABLE("MASTER_PORT");
    if (!rank || !world || !host) return false;
    launch->rank = NUMBER(-1, "RANK");
    launch->world = NUMBER(-1, "WORLD_SIZE");
    launch->local_rank = NUMBER(launch->rank, "LOCAL_RANK");
    set_job(launch, "torchrun", VARIABLE("TORCHELASTIC_RUN_ID"), port,
            VARIABLE("TORCHELASTIC_RESTART_COUNT"));
    int first = master_port(launch, TORCH_PORT);
    const char *agent = VARIABLE("TORCHELASTIC_USE_AGENT_STORE");
    if (agent && strcasecmp(agent, "false") != 0 && strcmp(agent, "0") != 0) {
        first++; /* torchrun itself listens there; the next is free for others */
        launch->fixed_port = false;
    }
    set_address(launch, host, first);
    int local = NUMBER(0, "LOCAL_WORLD_SIZE");
    launch->several = local > 0 && local < launch->world;
    share_cores(local);
    return true;
}

static bool from_open_mpi(ml_launch *launch) {
    const char *rank = VARIABLE("OMPI_COMM_WORLD_RANK"), *world = VARIABLE("OMPI_COMM_WORLD_SIZE");
    if (!rank || !world) return false;
    launch->rank = NUMBER(-1, "OMPI_COMM_WORLD_RANK");
    launch->world = NUMBER(-1, "OMPI_COMM_WORLD_SIZE");
    launch->local_rank = NUMBER(launch->rank, "OMPI_COMM_WORLD_LOCAL_RANK");
    set_job(launch, "Open MPI",
            VARIABLE("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"), NULL,
            NULL);
    int local = NUMBER(0, "OMPI_COMM_WORLD_LOCAL_SIZE");
    bool one_host = local == launch->world;
    launch->several = local > 0 && !one_host;
    share_cores(local);
    const char *host = VARIABLE("MASTER_ADDR");
    set_address(launch,
                host       ? host
                : one_host ? "127.0.0.1"
                           : NULL,
                master_port(launch, port_of(launch->job)));
    return true;
}

/* In a batch script itself (a job, but no step of it) the variables speak of steps to come. */
static bool from_slurm(ml_launch *launch) {
    const char *rank = VARIABLE("SLURM_PROCID");
    const char *world = VARIABLE("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
    const char *job = VARIABLE("SLURM_JOB_ID", "SLURM_JOBID");
    const char *step = VARIABLE("SLURM_STEP_ID", "SLURM_STEPID");
    if (!rank || !world || (job && !step)) return false;
    launch->rank = NUMBER(-1, "SLURM_PROCID");
    launch->world = NUMBER(-1, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
    launch->local_rank = NUMBER(launch->rank, "SLURM_LOCALID");
    set_job(launch, "Slurm", job, step, VARIABLE("SLURM_RESTART_COUNT"));
    char first[128] = "";
    const char *list = VARIABLE("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST");
    const char *host = VARIABLE("MASTER_ADDR");
    int hosts = NUMBER(list ? 0 : 1, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES");
    if (list) first_host(list, first, sizeof first);
    if (!host && hosts == 1) host = "127.0.0.1";
    if (!host) host = *first ? first : VARIABLE("SLURM_LAUNCH_NODE_IPADDR");
    set_address(launch, host, master_port(launch, port_of(launch->job)));
    launch->several = hosts > 1;
    share_cores(hosts > 0 ? (launch->world + hosts - 1) / hosts : 1);
    return true;
}

/* The environment of ml_launch_local; it is taken away, so that what this rank starts is no rank.
 */
static bool from_mlua(ml_launch *launch) {
    const char *rank = VARIABLE("MLUA_RANK"), *world = VARIABLE("MLUA_WORLD");
    const char *segment = VARIABLE("MLUA_SEGMENT"), *address = VARIABLE("MLUA_ADDRESS");
    const char *secret = VARIABLE("MLUA_JOB");
    if (!rank || !world || (!segment && !(address && secret))) return false;
    launch->rank = NUMBER(-1, "MLUA_RANK");
    launch->world = NUMBER(-1, "MLUA_WORLD");
    launch->local_rank = NUMBER(launch->rank, "MLUA_LOCAL_RANK");
    set_job(launch, "mlua run -n", NULL, NULL, NULL);
    if (segment) {
        int fd = NUMBER(-1, "MLUA_SEGMENT");
        snprintf(launch->address, sizeof launch->address, "fd:%d", fd);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    } else { /* they take themselves for ranks of several hosts */
        snprintf(launch->address, sizeof launch->address, "%s", address);
        snprintf(launch->secret, sizeof launch->secret, "%s", secret);
    }
    unsetenv("MLUA_RANK");
    unsetenv("MLUA_WORLD");
    unsetenv("MLUA_LOCAL_RANK");
    unsetenv("MLUA_SEGMENT");
    unsetenv("MLUA_ADDRESS");
    unsetenv("MLUA_JOB");
    return true;
}

static ml_comm_options options_read(void) {
    const ml_knobs_values *k = ml_knobs();
    return (ml_comm_options){
        .hosts = k->hosts, .timeout = k->timeout, .bind = k->bind, .secret = k->secret};
}

bool ml_launch_detect(ml_launch *launch) {
    memset(launch, 0, sizeof *launch);
    bool found =
        from_mlua(launch) || from_torchrun(launch) || from_open_mpi(launch) || from_slurm(launch);
    found = found && launch->world != 1;
    if (!found) *launch = (ml_launch){.world = 1};
    launch->options = options_read(); /* the ranks' own variables are no knobs: removed by now */
    return found;
}
