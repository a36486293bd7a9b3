-- Programs: functions over tensors, traced once and compiled.
local core = require "mlua.core"
local m = require "mlua"

---What was planned for a program.
---@class Plan
---@field flops number of one run; what `plan_only = "any"` and `estimate` may plan by an estimate has this alone
---@field attention_flops number of them, those of attention
---@field peak_bytes integer the most memory of a rank, with states
---@field arena_bytes integer of it, what lives during a run alone
---@field kinds table<string, integer> bytes at the peak by kind: parameters, gradients, optimizer, activations, workspace, ...
---@field seconds number that making the program took
---@field stages integer of a pipeline; 1 without
---@field idle string[] mesh axes whose ranks all do the same work

local function check_outputs(fn, outputs, updates)
  if outputs == nil and #updates == 0 then
    core.fail("the function of m.compile returns nothing and assigns no state: its program would do nothing", { at = fn, help = "end it with return x" })
  end
  if outputs ~= nil and not core.is_tensor(outputs) and (type(outputs) ~= "table" or m.is_module(outputs) or m.is_class(outputs)) then
    core.fail("the function of m.compile returns a tensor or a table of named tensors, got " .. m.shown(outputs), {
      at = fn, help = type(outputs) == "number" and "a number by a name is one too: return { value = 1 }" or "return x, or return { loss = x, norm = y }",
    })
  end
end

-- By what m.compile returned of a function that returns one tensor, the program itself.
local program_of = setmetatable({}, { __mode = "k" })

local function programs_of(list)
  if type(list) ~= "table" then return list end
  local programs = {}
  for i, program in ipairs(list) do programs[i] = program_of[program] or program end
  return programs
end

---Trace `fn(inputs)` once and compile it. `inputs` lists each input's axes and dtype:
---{tokens = {A.batch, A.seq, dtype="i32"}, lr = {}} (default dtype f32, which products round to the compute dtype unless
---the spec says dtype="f32"). fn gets a table of tensors
---and returns a tensor or a table of named tensors; states that it assigns are updated at each run.
---Calling the result with {tokens = Host or table, lr = 0.1} runs it and returns numbers (for tensors
---without axes) and Hosts. What it is fed has the input's dimensions; a table may also be a flat list, and a number fills all. options: `name`; `training` (dropout is active and, with an input `step`
---of dtype i64, differs at each step); `layout` of all programs and states (m.layout);
---`microbatches`: a step is so many calls of start and one of finish, which a pipeline overlaps; `often`: it runs many
---times before anything sets the parameters, as sampling does: what depends on them alone is cached where memory allows;
---`applies`: the programs of microbatches whose sums of gradients it applies to the parameters, with which it then writes what these
---programs cache of them; it leaves nothing in the sums, which the next step's first microbatch sets;
---`plan_only`: it is planned, which program:cost() and program:room() take, and not made: it takes no memory, and no check reports it; "any": to know
---whether it fits, and the first plan that does will do, of many layers by an estimate;
---`estimate`: in a check, an estimate of its plan will do where it has many layers;
---`group`: under a layout with cp = "dynamic", so many ranks run it by themselves, each group with inputs of its own
---(where ZeRO-1 leaves parameters in parts, after program:refresh() on all ranks);
---`mixed`: true, or a program made with it: under pipeline stages the microbatches of a step may be of any of these programs, which
---differ in sizes alone, and their number is what program:microbatches(count) says, up to `microbatches`.
---@param fn fun(inputs: table<string, Tensor>): Tensor|table<string, Tensor>
---@param inputs? table<string, table>
---@param options? {name: string, training: boolean, layout: table, microbatches: integer, often: boolean, applies: Program[], plan_only: boolean|"any", estimate: boolean, group: integer, mixed: boolean|Program}
---@return Program
function m.compile(fn, inputs, options)
  m.check_options("compile", options, { "name", "training", "layout", "microbatches", "often", "applies", "plan_only", "estimate", "group", "mixed" })
  if type(fn) ~= "function" then
    core.fail("m.compile takes a function, got " .. m.shown(fn), {
      help = m.is_module(fn) and "m.compile(function(inputs) return model(inputs.tokens) end, {tokens = {A.batch, A.seq, dtype=\"i32\"}})",
    })
  end
  options = options or {}
  if inputs ~= nil and type(inputs) ~= "table" then
    core.fail("m.compile's inputs are a table of axes by name, got " .. m.shown(inputs), { help = "{x = {A.batch, A.embed}, ids = {A.batch, dtype = \"i32\"}}" })
  end
  m.use_layout(options.layout, "m.compile")
  local names, feeds, list = {}, {}, {}
  for name in pairs(inputs or {}) do names[#names + 1] = name end
  for _, name in ipairs(names) do
    local spec = inputs[name]
    if core.is_tensor(spec) then -- an input that was made before
      feeds[name], spec = spec, nil
    elseif type(spec) ~= "table" then
      core.fail(("the input %s of m.compile is a list of axes, got %s"):format(tostring(name), m.shown(spec)), { help = ("{%s = {A.batch, A.embed}}"):format(tostring(name)) })
    end
    feeds[name] = feeds[name] or core.input(name, table.move(spec, 1, #spec, 1, {}), spec.dtype)
    list[#list + 1] = feeds[name]
  end
  setmetatable(feeds, {
    __index = function(_, name)
      local guess = core.suggest(tostring(name), names)
      if not guess and #names > 0 and core.tensor_methods[name] then
        core.fail(("%s is called on the table of inputs, which is no tensor"):format(name), {
          help = ("the function of m.compile gets a table: function(i) ... i.%s:%s(...)"):format(names[1], name),
        })
      end
      core.fail(("the program has no input %q"):format(tostring(name)), {
        help = guess and ("did you mean %s?"):format(guess) or "its inputs are " .. table.concat(names, ", "),
      })
    end,
  })
  local outer, outer_updates, traced = m.context, core.take_updates(), core.tracing(true)
  local silent = core.discard_output(false) -- what is printed while tracing is shown in a check too
  local step = rawget(feeds, "step")
  m.context = { sites = 0, training = options.training, step = step and step:dtype() == "i64" and step or nil,
    losses = {}, totals = {}, made = {}, group = options.group }
  local results = table.pack(pcall(core.from_here, function()
    local outputs = table.pack(fn(feeds))
    m.finish_totals()
    m.name_created(m.context.made)
    if outputs.n > 1 then
      core.fail(("the function of m.compile returns %d values, and one is taken"):format(outputs.n), {
        help = "a table names several: return { value = x, index = i }; sort and top_k have two results: (x:sort \"seq\") is the first",
      })
    end
    return outputs[1]
  end))
  m.context = outer
  core.discard_output(silent)
  local updates = core.take_updates()
  for _, update in ipairs(outer_updates) do update[1]:assign(update[2]) end -- of a program that is traced around this one
  core.tracing(traced)
  if not results[1] then error(results[2], 0) end
  check_outputs(fn, results[2], updates)
  m.check_layout()
  local outputs, single = results[2], false
  if core.is_tensor(outputs) then outputs, single = { result = outputs }, true end
  local program = core.program {
    name = options.name or "program", inputs = list, outputs = outputs or {}, updates = updates,
    microbatches = options.microbatches, often = options.often, applies = programs_of(options.applies), plan_only = options.plan_only, estimate = options.estimate,
    group = options.group, mixed = program_of[options.mixed] or options.mixed,
  }
  if not single then return program end
  local methods = {}
  local made = setmetatable({ program = program }, {
    __tostring = function() return tostring(program) end,
    __call = function(_, feed) return program(feed or {}).result end,
    __index = function(_, key)
      local value = program[key]
      if type(value) ~= "function" then return value end
      methods[key] = methods[key] or function(self, ...) return value(program, ...) end
      return methods[key]
    end,
  })
  program_of[made] = program
  return made
end
