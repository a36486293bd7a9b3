/* Training ranks that others started, that die, and that differ. */
#include <string.h>

#include "tests/process/support.h"

static const char model[] = "--device cpu --json \"$ROOT/models/gpt.lua\" layers=1 embed=32 heads=4"
                            " seq=16 batch=8 sample=0 warmup=1";

/* The line of the second step, without its times. */
static char *second_step(process_room *room, const char *output) {
    const char *line = strstr(output, "{\"step\":2,");
    REQUIRE(line != NULL);
    return ml_arena_copy(room->arena, line, (size_t)(strstr(line, ",\"tokens_per_s") - line));
}

/* Two processes with these variables each ("%d" is the rank) train like two ranks of -n. */
static void check_launcher(process_room *room, const char *variables) {
    process_result own = process_run(room, 0, "", "run -n 2 --mesh dp=2 %s steps=2", model);
    ml_text command = {.arena = room->arena};
    for (int rank = 1; rank >= 0; rank--) {
        ml_text_add(&command, "env ");
        ml_text_add(&command, variables, rank, rank);
        ml_text_add(&command, " timeout 100 \"$MLUA\" run --mesh dp=2 %s steps=2 >out%d 2>&1 %s ",
                    model, rank, rank ? "&" : "; wait; cat out0 >&2; test ! -s out1");
    }
    process_result other = process_shell(room, 0, "%s", command.text);
    CHECK_TEXT(second_step(room, other.output), second_step(room, own.output));
}

DIST_TEST(torchrun) {
    check_launcher(room, "RANK=%d LOCAL_RANK=%d WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
                         " MASTER_PORT=29437 MLUA_SECRET=of-this-test");
}

DIST_TEST(slurm) {
    check_launcher(room, "SLURM_PROCID=%d SLURM_LOCALID=%d SLURM_NTASKS=2 SLURM_JOB_ID=7391"
                         " SLURM_STEP_ID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1");
}

/* A number of ranks that is none is no reason to train alone. */
DIST_TEST(no_world) {
    static const char *const worlds[] = {"0", "two", "-2", "99999999999"};
    for (int i = 0; i < 4; i++) {
        process_result r = process_run(
            room, 1,
            ml_arena_format(room->arena, "RANK=0 WORLD_SIZE=%s MASTER_ADDR=127.0.0.1", worlds[i]),
            "run %s steps=2", model);
        process_expect(&r, i == 0 ? "rank 0 of 0 ranks (from torchrun)"
                                  : ml_arena_format(room->arena,
                                                    "WORLD_SIZE=%s is not a number (from torchrun)",
                                                    worlds[i]));
    }
}

/* Ranks on CPUs that take themselves for those of two hosts are refused, each rank alike; GPUs may
 * be on several (gpu_ranks/hosts). */
DIST_TEST(hosts) {
    process_result r =
        process_run(room, 1, "MLUA_HOSTS=2", "run -n 2 --mesh dp=2 %s steps=2", model);
    process_expect(&r, "ranks on the CPU must be on one host, and rank 1 is on another; use GPUs");
    CHECK(r.seconds < 20);
}

/* A rank that is killed while it trains is named with what it was doing; nothing is left. */
DIST_TEST(killed_rank) {
    process_result r = process_shell(
        room, 0,
        "\"$MLUA\" run -n 3 --mesh dp=3 --device cpu \"$ROOT/models/gpt.lua\" layers=1 embed=32 "
        "heads=4 seq=16 batch=9 sample=0 steps=1000000 >out 2>&1 & launcher=$!; "
        "for i in $(seq 1200); do grep -q 'first step after' out && break; sleep 0.05; done; "
        "set -- $(cat /proc/$launcher/task/$launcher/children); kill -9 $3; wait $launcher; "
        "code=$?; "
        "for pid in $*; do kill -0 $pid 2>/dev/null && echo left $pid; done; "
        "tail -n 1 out; test $code = 137");
    process_expect(&r, "was killed by signal 9");
    CHECK(strstr(r.output, "all_reduce over dp") || strstr(r.output, "reduce_scatter over dp") ||
          strstr(r.output, "all_gather over dp"));
    CHECK(!strstr(r.output, "left "));
}
