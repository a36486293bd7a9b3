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

TEST(gpu_decode, one_graph) {
    process_in_room(one_graph);
}
#endif
