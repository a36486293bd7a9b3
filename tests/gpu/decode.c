/* Decoding on a GPU: a token is one launch, with its choice on the device, and the CPU's token. */
#include <string.h>

#include "tests/process/support.h"

#ifdef MLUA_CUDA
#include "tests/gpu/bench.h"

static const char generate[] =
    "MLUA_DEBUG=1 $MLUA generate --from run --dtype f32 --prompts p.txt --tokens 8 --temperature 1 "
    "--top_p 0.9 "
    "--repetition_penalty 1.1 --seed 3 %s --device %s 2>debug-%s | sed 's/\"logprob\":[^,]*,//'";

static void one_graph(process_room *room) {
    gpu_need(1);
    process_write(room, "p.txt", "local x\nab\n");
    process_run(room, 0, "",
                "run --quiet --device cpu \"$ROOT\"/models/llama.lua layers=1 embed=32 heads=2 "
                "kv_heads=1 ffn=48 seq=32 batch=4 steps=6 lr=0.02 warmup=1 sample=0 --out run");
    for (int invariant = 0; invariant < 2; invariant++) {
        const char *flag = invariant ? "--batch-invariant --rows 3" : "";
        char *cpu = process_shell(room, 0, generate, flag, "cpu", "cpu").output;
        char *gpu = process_shell(room, 0, generate, flag, "cuda", "cuda").output;
        CHECK(strstr(cpu, "\"index\":1") != NULL);
        CHECK_TEXT(gpu, cpu);
        process_result debug = process_shell(room, 0, "grep 'one graph\\|eagerly' debug-cuda");
        process_expect(&debug, "a run of program \"step\" is the launch of one graph");
        CHECK(!strstr(debug.output, "eagerly"));
    }
}

/* Kernels of a step start before those ahead have ended, and read what no step writes at once. The
 * first of a run must not: what it reads, the run before may write (MLUA_EARLY). */
static void early_launches(process_room *room) {
    gpu_need(1);
    process_run(room, 0, "",
                "run --quiet --device cpu \"$ROOT\"/models/llama.lua layers=1 embed=32 heads=2 "
                "kv_heads=1 ffn=48 seq=32 batch=4 steps=2 sample=0 --out run");
    process_shell(room, 0,
                  "EMULATOR_LAUNCHES=launches $MLUA generate --from run --prompt ab --tokens 4 "
                  "--device cuda --quiet");
    char *text =
        test_read_file(room->arena, ml_arena_format(room->arena, "%s/launches", room->folder));
    if (!text) test_skip("not on an emulated GPU, which lists launches");
    int captures = 0, early = 0;
    bool first = false; /* of a run */
    for (char *place, *line = strtok_r(text, "\n", &place); line;
         line = strtok_r(NULL, "\n", &place)) {
        const bool starts_early = strncmp(line, "early ", 6) == 0;
        if (strncmp(line, "capture", 7) == 0) {
            captures++, first = true;
            continue;
        }
        EXPECT(!first || !starts_early, "the first kernel of a run starts early: %s", line);
        early += starts_early, first = false;
    }
    EXPECT(captures >= 1 && early >= 10, "%d graphs, %d early launches", captures, early);
}
TEST(gpu_decode, early_launches) {
    process_in_room(early_launches);
}

TEST(gpu_decode, one_graph) {
    process_in_room(one_graph);
}
#endif
