/* Several GPUs, a rank each: what they learn is what one learns. Layouts that need more GPUs than
 * there are pass over. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

#ifdef MLUA_CUDA
#include "tests/gpu/bench.h"

enum { STEPS = 4 };
typedef struct {
    double loss[STEPS], norm[STEPS];
    const char *output;
} learned;

#define RUN                                                                                        \
    "run \"$ROOT/models/%s.lua\" --device cuda --dtype f32 --json -n %d layers=2 embed=32 "        \
    "heads=4 seq=16 batch=8 vocab=256 sample=0 warmup=1 steps=%d %s"

/* models/gpt.lua, or llama.lua where documents are packed. */
static learned train(process_room *room, int ranks, const char *knobs, const char *arguments) {
    learned out;
    process_result r =
        process_run(room, 0, ml_arena_format(room->arena, "EMULATOR_SHARES=1 %s", knobs), RUN,
                    strstr(arguments, "pack=") ? "llama" : "gpt", ranks, STEPS, arguments);
    out.output = r.output;
    for (int i = 0; i < STEPS; i++) {
        char *line = strstr(r.output, ml_arena_format(room->arena, "{\"step\":%d,", i + 1));
        if (!line) ml_raise(ML_INTERNAL, "no step %d in\n%s", i + 1, r.output);
        out.loss[i] = process_number(line, "\"loss\":");
        out.norm[i] = process_number(line, "\"grad_norm\":");
    }
    return out;
}

/* What the run printed; "" where it takes more GPUs. */
static const char *compare_under(process_room *room, const char *knobs, const learned *one,
                                 int ranks, const char *arguments) {
    if (ml_cuda_count() < ranks && !strstr(knobs, "MLUA_HOSTS=2")) return "";
    learned many = train(room, ranks, knobs, arguments);
    for (int i = 0; i < STEPS; i++) {
        double loss = fabs(many.loss[i] / one->loss[i] - 1);
        double norm = fabs(many.norm[i] / one->norm[i] - 1);
        EXPECT(loss <= 1e-5 && norm <= 1e-4,
               "%d ranks, %s, %s: step %d has loss %.9g and norm %.9g, not %.9g and %.9g", ranks,
               arguments, knobs, i + 1, many.loss[i], many.norm[i], one->loss[i], one->norm[i]);
    }
    return many.output;
}

static void compare(process_room *room, const learned *one, int ranks, const char *arguments) {
    compare_under(room, "MLUA_VERIFY=1", one, ranks, arguments);
}

static void gpu_ranks_layouts(process_room *room) {
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "");
    compare(room, &one, 2, "--mesh dp=2");
    compare(room, &one, 2, "--mesh tp=2");
    compare(room, &one, 2, "--mesh cp=2");
    compare(room, &one, 2, "--mesh dp=2 layout=fsdp");
    compare_under(room, "MLUA_PEER=0", &one, 2, "--mesh dp=2");
    compare_under(room, "MLUA_PEER=0", &one, 2, "--mesh dp=2 layout=fsdp");
    compare(room, &one, 4, "--mesh dp=2,tp=2");
    compare(room, &one, 4, "--mesh dp=4 layout=fsdp");
    compare(room, &one, 4, "--mesh pp=2,tp=2");
}
/* As plans are where memory is short: collectives follow one another, several in a launch. */
static void gpu_ranks_in_order(process_room *room) {
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "");
    compare_under(room, "MLUA_OVERLAP=0", &one, 2, "--mesh dp=2");
    compare_under(room, "MLUA_OVERLAP=0", &one, 2, "--mesh dp=2 layout=fsdp");
}
/* By copies between the GPUs, also where loads of kernels and graphs wait for all that runs; sums
 * of more than a stage too. */
static void gpu_ranks_copies(process_room *room) {
    static const char *const layouts[] = {"dp=2",
                                          "dp=2 layout=fsdp",
                                          "dp=2 layout=fsdp reshard=false",
                                          "dp=4 reshard=false",
                                          "dp=2 layout=fsdp vocab=9000 embed=256",
                                          "dp=2,tp=2",
                                          "dp=2,cp=2 layout=fsdp"};
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "");
    for (int i = 0; i < 7; i++) {
        const char *arguments = ml_arena_format(room->arena, "--mesh %s", layouts[i]);
        int ranks = i == 3 || i > 4 ? 4 : 2;
        if (ml_cuda_count() < ranks) continue;
        if (i == 5) one = train(room, 1, "MLUA_VERIFY=1", "");
        if (i == 4) one = train(room, 1, "MLUA_VERIFY=1", "vocab=9000 embed=256");
        const char *output = compare_under(room, "MLUA_PEER=1 MLUA_DEBUG=1 EMULATOR_WAITS=1", &one,
                                           ranks, arguments);
        const char *said = strstr(output, "go by copies");
        while (said && said > output && said[-1] != '\n') said--;
        EXPECT(!(!said || strstr(said, "peer: 0 of")), "no copies of %s", arguments);
    }
}
/* Steps on their streams or as one CUDA graph: the same, with copies between the GPUs in each. */
static void gpu_ranks_graphs(process_room *room) {
    static const char *const layouts[] = {"--mesh dp=2 layout=fsdp", "--mesh tp=2", "--mesh cp=2"};
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "");
    for (int i = 0; i < 6; i++) {
        const char *knobs = i % 2 ? "MLUA_GRAPHS=1 MLUA_DEBUG=1" : "MLUA_GRAPHS=0 MLUA_DEBUG=1";
        const char *output = compare_under(room, knobs, &one, 2, layouts[i / 2]);
        CHECK(strstr(output, "go by copies") != NULL);
        CHECK_EQ_INT(strstr(output, "is the launch of one graph") != NULL, i % 2);
    }
}
TEST(gpu_ranks, graphs_or_streams) {
    process_in_room(gpu_ranks_graphs);
}

/* Sums of gradients over ranks beside the last microbatch, whose program is on streams or one
 * graph: over one mesh axis or two, by all-reduce or to each rank's part. */
static void gpu_ranks_leading(process_room *room) {
    static const char *const layouts[] = {"dp=2 --layout zero=false", "dp=2 --layout zero=true",
                                          "dp=2,tp=2 --layout zero=true",
                                          "dp=2,cp=2 --layout zero=false"};
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "accum=4");
    for (int i = 0; i < 8; i++) {
        const char *output = compare_under(
            room,
            ml_arena_format(room->arena, "MLUA_DEBUG=1 EMULATOR_EARLY=1 MLUA_GRAPHS=%d", i % 2),
            &one, i < 4 ? 2 : 4, ml_arena_format(room->arena, "accum=4 --mesh %s", layouts[i / 2]));
        EXPECT(!*output || strstr(output, "begin beside the run before: yes"), "none lead with %s",
               layouts[i / 2]);
    }
    compare_under(room, "MLUA_PEER=0 EMULATOR_EARLY=1", &one, 2,
                  "accum=4 --mesh dp=2 --layout zero=false");
}
TEST(gpu_ranks, leading) {
    process_in_room(gpu_ranks_leading);
}

/* Parameters in parts are gathered beside the first microbatch of a step, whose program is on
 * streams or one graph, by copies or by NCCL; not along an axis that it uses itself. */
static void gpu_ranks_prefetch(process_room *room) {
    static const char *const layouts[] = {"dp=2", "dp=2,tp=2", "dp=4", "cp=2"};
    static const char said[] = "continue beside the next program",
                      wide[] = "accum=2 embed=256 layers=1";
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", wide);
    for (int i = 0; i < 4; i++) {
        const char *layout = layouts[i];
        const char *output = compare_under(
            room, ml_arena_format(room->arena, "MLUA_DEBUG=1 MLUA_GRAPHS=%d", i % 2), &one,
            i % 3 ? 4 : 2,
            ml_arena_format(room->arena, "%s --mesh %s --layout zero=true", wide, layout));
        if (*output) CHECK_EQ_INT(strstr(output, said) != NULL, strcmp(layout, "cp=2") != 0);
    }
    const char *two = ml_arena_format(room->arena, "%s --mesh dp=2 --layout zero=true", wide);
    CHECK(strstr(compare_under(room, "MLUA_DEBUG=1 MLUA_PEER=0", &one, 2, two), said) != NULL);
    compare_under(room, "MLUA_CHECK=cpu", &one, 2, two);
}
TEST(gpu_ranks, prefetch) {
    process_in_room(gpu_ranks_prefetch);
}

/* Likewise where groups of ranks run programs of their own, whose cached parameters all gather. By
 * NCCL too: larger groups' programs wait for that before their own collectives. */
static void gpu_ranks_prefetch_of_groups(process_room *room) {
    static const char documents[] =
        "awk 'BEGIN { srand(7); for (i = 0; i < 3000; i++) { s = \"\"; n = exp(1 + 2 * rand()); "
        "while (length(s) < n) s = s int(10 * rand()); printf \"{\\\"text\\\":\\\"%%s\\\"}\\n\", "
        "s } }' > text.jsonl";
    static const char packed[] =
        "layers=1 embed=256 kv_heads=4 ffn=512 seq=32 accum=8 pack=document "
        "data=text.jsonl";
    gpu_need(2);
    process_shell(room, 0, documents);
    learned one = train(room, 1, "MLUA_VERIFY=1", packed);
    static const char *const knobs[] = {"MLUA_GRAPHS=1", "MLUA_GRAPHS=0", "MLUA_PEER=0",
                                        "MLUA_PEER=0 MLUA_GRAPHS=0"};
    for (int i = 0; i < 4; i++) {
        const int ranks = 2 + 2 * (i % 2);
        const char *output = compare_under(
            room, ml_arena_format(room->arena, "MLUA_DEBUG=1 %s", knobs[i]), &one, ranks,
            ml_arena_format(room->arena,
                            "%s --mesh cp=%d --layout cp=dynamic,zero=true,cp_tokens=%d", packed,
                            ranks, 32 / ranks));
        EXPECT(!*output || strstr(output, "continue beside the next program"), "none on %d", ranks);
        const bool waits = strstr(output, "end before the program's first collective") != NULL;
        EXPECT(!*output || waits == (strstr(knobs[i], "MLUA_PEER=0") != NULL), "on %d", ranks);
    }
}
TEST(gpu_ranks, prefetch_of_groups) {
    process_in_room(gpu_ranks_prefetch_of_groups);
}

/* One of those that copy dies, along one mesh axis or two: the others do not wait for it for ever.
 */
static void gpu_ranks_copies_fault(process_room *room) {
    static const char *const layouts[] = {"-n 2 --mesh dp=2 layout=fsdp", "-n 4 --mesh dp=2,tp=2"};
    for (int i = 0; i < 2; i++) {
        if (i == 0) gpu_need(2);
        if (ml_cuda_count() < 2 + 2 * i) return;
        process_result r = process_shell(
            room, PROCESS_ANY_CODE,
            "MLUA_PEER=1 MLUA_TIMEOUT=4 timeout 60 $MLUA run $ROOT/models/gpt.lua --device cuda %s "
            "layers=2 embed=32 heads=4 seq=16 batch=8 vocab=256 sample=0 steps=1000000 & sleep %d; "
            "kill -KILL $(pgrep -P $(pgrep -P $!) | tail -n 1); wait $!",
            layouts[i], getenv("EMULATOR") ? 6 : 12);
        process_expect(&r, i ? "rank 3" : "rank 1");
        CHECK(r.code != 0 && r.code != 124 && r.seconds < 40);
    }
}
TEST(gpu_ranks, copies) {
    process_in_room(gpu_ranks_copies);
}
TEST(gpu_ranks, copies_fault) {
    process_in_room(gpu_ranks_copies_fault);
}

/* Every schedule, also where loads of kernels, graphs and connections wait for all that runs. */
static void gpu_ranks_pipelines(process_room *room) {
    static const char *const schedules[] = {"1f1b", "interleaved", "zero-bubble"};
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "layers=8 accum=4");
    compare_under(room, "MLUA_CHECK=cpu", &one, 2, "--mesh pp=2 layers=8 accum=4");
    for (int i = 0; i < 3; i++) {
        const char *s = schedules[i];
        const char *two =
            ml_arena_format(room->arena, "--mesh pp=2 layers=8 accum=4 schedule=%s", s);
        compare_under(room, "EMULATOR_WAITS=1", &one, 2, two);
        compare_under(room, "MLUA_PEER=0 EMULATOR_WAITS=1", &one, 2, two);
        compare_under(room, "EMULATOR_WAITS=1", &one, 4,
                      ml_arena_format(room->arena, "--mesh pp=4 layers=8 accum=8 schedule=%s", s));
    }
}
TEST(gpu_ranks, pipelines) {
    process_in_room(gpu_ranks_pipelines);
}

TEST(gpu_ranks, in_order) {
    process_in_room(gpu_ranks_in_order);
}
TEST(gpu_ranks, layouts) {
    process_in_room(gpu_ranks_layouts);
}

/* Rank 1 fails before its fifth sum; the other one waits for it on its GPU. */
static const char fault_script[] =
    "local m, core = require 'mlua', require 'mlua.core'\n"
    "local cfg = m.config { how = 'none', victim = 1, ranks = 2 }\n"
    "local A = m.axes { batch = 8 }\n"
    "local sum = m.compile(function(feeds) return (feeds.x * feeds.x):sum('batch') end,\n"
    "  { x = { A.batch, dtype = 'f32' } }, { name = 'sum', layout = m.layout.ddp { dp = cfg.ranks "
    "} })\n"
    "local x = core.host('f32', 8)\n"
    "for i = 1, 100000 do\n"
    "  if i == 5 and core.options().rank == cfg.victim then\n"
    "    if cfg.how == 'kill' then os.execute('kill -KILL $PPID') end\n"
    "    if cfg.how == 'stop' then os.execute('kill -STOP $PPID') end\n"
    "    if cfg.how == 'hang' then os.execute('sleep 60') end\n"
    "    if cfg.how == 'error' then error('this rank fails') end\n"
    "  end\n"
    "  assert(tonumber(sum { x = x }) == 0)\n"
    "end\n";

static void gpu_ranks_faults(process_room *room) {
    static const struct {
        const char *how, *says;
        int code;
    } faults[] = {{"kill", "rank 0 waits in work on a GPU: sum 5", 137},
                  {"hang", "rank 0 waits in work on a GPU: sum 5", PROCESS_ANY_CODE},
                  {"error", "this rank fails", 1}};
    gpu_need(2);
    process_write(room, "fault.lua", fault_script);
    for (int i = 0; i < 3; i++) {
        process_result r = process_run(
            room, faults[i].code, "MLUA_TIMEOUT=4",
            "run fault.lua --device cuda --dtype f32 --quiet -n 2 how=%s", faults[i].how);
        process_expect(&r, "rank 1");
        process_expect(&r, faults[i].says);
        CHECK(r.code != 0 && r.seconds < 40);
    }
    if (!getenv("EMULATOR")) return;
    process_result r = process_run(room, PROCESS_ANY_CODE, "EMULATOR_NCCL_ERROR=6 MLUA_TIMEOUT=9",
                                   "run fault.lua --device cuda --quiet -n 2 how=hang");
    process_expect(&r, "what the GPUs send one another failed");
    CHECK(r.code != 0);
}
TEST(gpu_ranks, faults) {
    process_in_room(gpu_ranks_faults);
}

/* Four ranks that take themselves for those of two hosts, which may share two GPUs: memory of
 * others is opened within a host, and what is sent between them is sent by NCCL, in copies,
 * collectives and messages alike. */
static void gpu_ranks_hosts(process_room *room) {
    static const struct {
        const char *arguments;
        bool copies, pairs; /* some collectives go by copies; some messages by NCCL */
    } cases[] = {{"--mesh dp=2,tp=2", true, false},
                 {"--mesh dp=4 layout=fsdp", false, false},
                 {"--mesh pp=2,dp=2", false, true},
                 {"--mesh pp=4 layers=4 accum=4", false, true}};
    gpu_need(2);
    learned one = train(room, 1, "MLUA_VERIFY=1", "");
    for (int i = 0; i < 4; i++) {
        const char *arguments = cases[i].arguments;
        if (i == 3) one = train(room, 1, "MLUA_VERIFY=1", "layers=4 accum=4");
        const char *output = compare_under(room, "MLUA_HOSTS=2 MLUA_DEBUG=1", &one, 4, arguments);
        CHECK_EQ_INT(strstr(output, "of step go by copies") && !strstr(output, "peer: 0 of"),
                     cases[i].copies);
        CHECK_EQ_INT(strstr(output, "by NCCL: channel") != NULL, cases[i].pairs);
        if (i == 3) CHECK(strstr(output, "by copies: channel") != NULL);
    }
}
TEST(gpu_ranks, hosts) {
    process_in_room(gpu_ranks_hosts);
}

/* Two ranks of two hosts do with one GPU: all that is sent between them is sent by NCCL. */
static void gpu_hosts(process_room *room) {
    static const char *const meshes[] = {"--mesh dp=2 accum=4", "--mesh pp=2 accum=4"};
    learned one = train(room, 1, "MLUA_VERIFY=1", "accum=4");
    for (int i = 0; i < 2; i++) compare_under(room, "MLUA_HOSTS=2", &one, 2, meshes[i]);
}
TEST(gpu, hosts) {
    process_in_room(gpu_hosts);
}

/* The same as cluster launchers start them on two nodes: where this user may, each has its own
 * network, and what joins them is a pair of (virtual) Ethernet cards; else two addresses. */
static const char two_nodes[] =
    "join='' here=127.0.0.2 list='127.0.0.[2-3]'\n"
    "if [ -z \"$APART\" ] && unshare -rn true 2>/dev/null && command -v ip nsenter >/dev/null; "
    "then\n"
    "    APART=1 exec unshare -rn \"$BASH\" \"$0\" \"$@\"; fi\n"
    "if [ -n \"$APART\" ]; then\n"
    "    ip link set lo up; unshare -n sleep 300 & far=$!; sleep 0.5\n"
    "    ip link add va type veth peer name vb netns $far || exit 3\n"
    "    ip addr add 10.77.0.1/24 dev va; ip link set va up\n"
    "    join=\"nsenter -t $far -n\"\n"
    "    $join ip link set lo up; $join ip addr add 10.77.0.2/24 dev vb; $join ip link set vb up\n"
    "    here=10.77.0.1 list='10.77.0.[1-2]'; fi\n"
    "echo \"rank 0 is at $here ${APART:+by ethernet}\"\n"
    "export MLUA_SECRET=test MLUA_HOSTS=2; [ $1 = auto ] || export MLUA_BIND=$1\n"
    "for r in 3 2 1 0; do\n"
    "    case $2 in\n"
    "    torchrun) export RANK=$r LOCAL_RANK=$r WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 "
    "\\\n"
    "        MASTER_ADDR=$here MASTER_PORT=29611 ;;\n"
    "    slurm) export SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_NTASKS=4 SLURM_JOB_ID=77 \\\n"
    "        SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=\"$list\" ;;\n"
    "    mpi) export OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_LOCAL_RANK=$r OMPI_COMM_WORLD_SIZE=4 "
    "\\\n"
    "        OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=$here PMIX_NAMESPACE=job-9 ;;\n"
    "    esac\n"
    "    at=''; [ $r -lt 2 ] || at=$join\n"
    "    $at timeout 100 \"$MLUA\" run \"$ROOT/models/gpt.lua\" --device cuda --dtype f32 --json "
    "\\\n"
    "        layers=2 embed=32 heads=4 seq=16 batch=8 vocab=256 sample=0 warmup=1 steps=4 \\\n"
    "        --mesh dp=2,tp=2 & pids=\"$pids $!\"\n"
    "done\n"
    "code=0; for p in $pids; do wait $p || code=1; done\n"
    "[ -z \"$far\" ] || kill $far; exit $code\n";

static void gpu_ranks_nodes(process_room *room) {
    static const char *const launchers[] = {"auto torchrun", "auto slurm", "0.0.0.0 mpi"};
    gpu_need_emulator(); /* elsewhere ranks of two networks see no GPU in common */
    learned one = train(room, 1, "MLUA_VERIFY=1", "");
    process_write(room, "two_nodes.sh", two_nodes);
    for (int i = 0; i < 3; i++) {
        process_result r = process_shell(room, 0, "bash two_nodes.sh %s", launchers[i]);
        char *last = strstr(r.output, ml_arena_format(room->arena, "{\"step\":%d,", STEPS));
        if (!last) ml_raise(ML_INTERNAL, "no last step in\n%s", r.output);
        double off = fabs(process_number(last, "\"loss\":") / one.loss[STEPS - 1] - 1);
        EXPECT(off <= 1e-5, "two nodes, %s: the loss is off by %g", launchers[i], off);
    }
}
TEST(gpu_ranks, nodes) {
    process_in_room(gpu_ranks_nodes);
}

/* A rank of the other host dies, or stops: all receive the error, and end. */
static void gpu_ranks_hosts_fault(process_room *room) {
    static const struct {
        const char *how, *says;
    } faults[] = {{"kill", "rank 3 (pid"},
                  {"stop", "rank 3 (pid"},
                  {"hang", "shows no progress"},
                  {"error", "this rank fails"}};
    gpu_need(2);
    process_write(room, "fault.lua", fault_script);
    for (int i = 0; i < 4; i++) {
        process_result r = process_run(
            room, PROCESS_ANY_CODE, "MLUA_TIMEOUT=4 MLUA_HOSTS=2",
            "run fault.lua --device cuda --dtype f32 --quiet -n 4 victim=3 ranks=4 how=%s",
            faults[i].how);
        process_expect(&r, faults[i].says);
        if (i < 3) process_expect(&r, "rank 3 (pid");
        CHECK(r.code != 0 && r.seconds < 30);
    }
}
TEST(gpu_ranks, hosts_fault) {
    process_in_room(gpu_ranks_hosts_fault);
}
#else
TEST(gpu_ranks, all) {
    test_skip("built without the CUDA toolkit's headers");
}
#endif
