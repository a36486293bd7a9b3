/* Adapters in PEFT's files (stdlib/peft.lua); tests/lua/lib/adapter.lua makes them, and the weights
 * with them added by hand. */
#include <stdlib.h>

#include "tests/process/support.h"

#define MAKE "run \"$ROOT/tests/lua/lib/adapter.lua\" --device cpu "
#define IDS "--ids 5,3,60,11 --tokens 24 --json --device cpu "

/* models/llama.lua with adapters beside its weights. */
static void write_adapted(process_room *room) {
    process_write(room, "adapted.lua",
                  "local m = require 'mlua'\n"
                  "local train = m.train\n"
                  "function m.train(o)\n"
                  "  m.lora(o.model, { rank = 2, alpha = 6, match = { 'wq', 'wk', 'wo', 'down', "
                  "'head' } })\n"
                  "  return train(o)\n"
                  "end\n"
                  "dofile(os.getenv 'ROOT' .. '/models/llama.lua')\n");
}

static void make(process_room *room, const char *name, const char *settings) {
    process_run(room, 0, "", MAKE "name=%s %s", name, settings);
    process_shell(room, 0, "cp \"$ROOT/tests/hf/%s/config.json\" %s-merged", name, name);
}

/* Without m.lora in the script they become part of the weights; those of GPT-2 lie [in, out], and
 * q, k and v in one tensor. */
PROCESS_TEST(peft_merged) {
    make(room, "gpt2", "modules='c_attn c_fc c_proj'");
    make(room, "llama", "held=lm_head");
    process_shell(room, 0,
                  "for k in llama-adapter llama-merged \"$ROOT/tests/hf/llama\"; do "
                  "\"$MLUA\" generate --from \"$k\" " IDS ">>ids || exit 1; done; "
                  "test $(sort -u ids | wc -l) = 2 && test $(head -2 ids | sort -u | wc -l) = 1");
    static const char *const names[] = {"llama", "gpt2"};
    for (int i = 0; i < 2; i++) {
        process_run(room, 0, "", "export %s-adapter %s --hf --device cpu", names[i], names[i]);
        process_run(room, 0, "",
                    MAKE "compare=%s/model.safetensors against=%s-merged/model.safetensors "
                         "within=1e-6",
                    names[i], names[i]);
    }
}

/* With m.lora they are its parameters, and are written as they were read. */
PROCESS_TEST(peft_beside) {
    write_adapted(room);
    make(room, "llama", "");
    process_shell(room, 0,
                  "\"$MLUA\" generate adapted.lua --from llama-adapter " IDS ">a && "
                  "\"$MLUA\" generate --from llama-merged " IDS ">b && cmp a b");
    process_run(room, 0, "",
                "export \"$ROOT/tests/hf/llama,llama-adapter\" out --hf --adapter --script "
                "adapted.lua --device cpu");
    process_run(room, 0, "",
                MAKE "compare=out/adapter_model.safetensors "
                     "against=llama-adapter/adapter_model.safetensors");
    process_run(room, 0, "", "export out again --hf --adapter --script adapted.lua --device cpu");
    process_shell(room, 0,
                  "cmp out/adapter_model.safetensors again/adapter_model.safetensors && "
                  "cmp out/adapter_config.json again/adapter_config.json");
    process_result r =
        process_shell(room, 0, "tr -d ' \\n' <out/adapter_config.json && echo && ls out");
    process_expect(&r, "\"lora_alpha\":6,");
    process_expect(&r, "\"r\":2,");
    process_expect(&r, "\"target_modules\":[\"down_proj\",\"k_proj\",\"lm_head\",\"o_proj\","
                       "\"q_proj\"]");
    process_expect(&r, "tests/hf/llama\"");
    process_expect(&r, "adapter_config.json\nadapter_model.safetensors\n");
}

/* What a run learned, with where its weights came from. */
PROCESS_TEST(peft_of_a_run) {
    write_adapted(room);
    process_shell(room, 0, "for i in 0 1 2 3 4 5 6 7 8 9; do echo 0123456789; done >text");
    process_run(room, 0, "",
                "run adapted.lua --from \"$ROOT/tests/hf/llama\" --out a --device cpu steps=3 "
                "seq=16 batch=2 accum=1 data=text sample=0 warmup=0 lr=0.1");
    process_run(room, 0, "", "export a b --hf --adapter --device cpu");
    process_run(room, 0, "", "export a c --hf --device cpu");
    process_run(room, 0, "", "export b d --hf --device cpu");
    process_run(room, 0, "",
                MAKE "compare=c/model.safetensors against=d/model.safetensors within=1e-6");
}

DIST_TEST(peft_ranks) {
    write_adapted(room);
    make(room, "llama", "");
    process_shell(room, 0,
                  "\"$MLUA\" generate --from llama-merged " IDS ">a && "
                  "for s in '' adapted.lua; do \"$MLUA\" generate $s --from llama-adapter -n 2 "
                  "--mesh tp=2 " IDS ">b && cmp a b || exit 1; done");
}

static void refused(process_room *room, const char *arguments, const char *message) {
    process_result r = process_run(room, 1, "", "%s", arguments);
    process_expect(&r, message);
}

PROCESS_TEST(peft_refusals) {
    static const struct {
        const char *field, *message;
    } cases[] = {
        {"\"use_dora\": true", "adapter_config.json: use_dora = true is not supported"},
        {"\"rank_pattern\": {\"q_proj\": 4}", "rank_pattern = {\"q_proj\":4} is not supported"},
        {"\"modules_to_save\": [\"lm_head\"]", "modules_to_save = [\"lm_head\"] is not supported"},
        {"\"lora_bias\": true", "lora_bias = true is not supported"},
        {"\"bias\": \"all\"", "bias = \"all\" is not supported"},
        {"\"init_lora_weights\": \"pissa\"", "init_lora_weights = \"pissa\" is not supported"},
        {"\"lora_alpha\": 0", "lora_alpha must be a number above 0, got 0"},
        {"\"r\": 3", "lora_A.weight is [2, "},
        {"\"base_model_name_or_path\": \"org/name\"",
         "l holds adapters of org/name, which is not a folder here"},
    };
    static const char check[] = "check \"$ROOT/models/llama.lua\" --from l seq=16 batch=2";
    write_adapted(room);
    make(room, "llama", "");
    process_shell(room, 0, "cp -r llama-adapter l");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_write(room, "field", cases[i].field);
        process_shell(room, 0,
                      "f=$(cut -d: -f1 field); { tr -d '\\n' <llama-adapter/adapter_config.json | "
                      "sed \"s|$f *: *[^,}]*,||; s|}$||\"; echo ','; cat field; echo '}'; } "
                      ">l/adapter_config.json");
        refused(room, check, cases[i].message);
    }
    refused(room, "check adapted.lua --from \"$ROOT/tests/hf/gpt2,llama-adapter\"",
            "this script is no GPT2LMHeadModel");
    process_run(room, 0, "", MAKE "modules='q_proj v_proj' r=4 name=qwen2");
    process_shell(room, 0, "rm -rf l && mkdir l && cp qwen2-adapter/* l");
    refused(room, "check adapted.lua --from \"$ROOT/tests/hf/llama,l\" seq=16 batch=2",
            "r = 4 and lora_alpha = 6, and the script's m.lora has rank = 2 and alpha = 6");
    process_shell(room, 0, "sed 's/\\bwk\\b/wv/' adapted.lua >other.lua");
    process_result r = process_run(
        room, 1, "", "check other.lua --from llama-adapter seq=16 batch=2 --device cpu");
    process_expect(&r, "the file alone: model.layers.0.self_attn.k_proj (blocks.1.wk), model");
    process_expect(&r, "the script alone: model.layers.0.self_attn.v_proj (blocks.1.wv), model");
    process_result usage = process_run(room, 2, "", "export llama-adapter e --adapter");
    process_expect(&usage, "--adapter writes a folder of PEFT's");
    refused(room, "export llama-adapter e --hf --adapter --device cpu",
            "the model has no adapters");
}
