-- What GET /metrics of mlua serve gives: counters, gauges and histograms as Prometheus reads them.
local Metrics = {}
Metrics.__index = Metrics

local HELP = {
  mlua_requests_total = { "counter", "requests that were answered, by status; 499: the client left before" },
  mlua_prompt_tokens_total = { "counter", "tokens of the prompts of requests that were accepted" },
  mlua_generated_tokens_total = { "counter", "tokens that were generated" },
  mlua_steps_total = { "counter", "steps of the decoder" },
  mlua_preemptions_total = { "counter", "texts that gave their place in the cache to another one, and are read again" },
  mlua_texts_running = { "gauge", "texts that are generated now" },
  mlua_texts_waiting = { "gauge", "texts that wait for a place" },
  mlua_slots = { "gauge", "places for texts" },
  mlua_cache_blocks_used = { "gauge", "blocks of the cache in use" },
  mlua_cache_blocks = { "gauge", "blocks of the cache" },
  mlua_first_token_seconds = { "histogram", "from a request's arrival to its first token" },
  mlua_request_seconds = { "histogram", "from a request's arrival to its last token" },
}
local BOUNDS = { 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600 }

---@return table
function Metrics.new()
  local self = setmetatable({ values = {}, histograms = {} }, Metrics)
  for name, help in pairs(HELP) do
    if help[1] == "histogram" then
      local counts = {}
      for i = 1, #BOUNDS do counts[i] = 0 end
      self.histograms[name] = { counts = counts, count = 0, sum = 0 }
    elseif name ~= "mlua_requests_total" then
      self.values[name] = { [""] = 0 }
    end
  end
  return self
end

---Add to a counter; `labels`: 'status="200"'.
---@param name string
---@param amount? number
---@param labels? string
function Metrics:add(name, amount, labels)
  local values = self.values[name] or {}
  labels = labels and "{" .. labels .. "}" or ""
  self.values[name] = values
  values[labels] = (values[labels] or 0) + (amount or 1)
end

---@param name string
---@param value number
function Metrics:set(name, value) self.values[name][""] = value end

---@param name string of a histogram
---@param seconds number
function Metrics:observe(name, seconds)
  local h = self.histograms[name]
  for i, bound in ipairs(BOUNDS) do
    if seconds <= bound then h.counts[i] = h.counts[i] + 1 end
  end
  h.count, h.sum = h.count + 1, h.sum + seconds
end

local function number(value) return math.type(value) == "integer" and ("%d"):format(value) or ("%.9g"):format(value) end

---The text in Prometheus' format, version 0.0.4.
---@return string
function Metrics:text()
  local lines = {}
  local function line(...) lines[#lines + 1] = table.concat { ... } end
  for name, help in pairs(HELP) do
    line("# HELP ", name, " ", help[2])
    line("# TYPE ", name, " ", help[1])
    for labels, value in pairs(self.values[name] or {}) do line(name, labels, " ", number(value)) end
    local h = self.histograms[name]
    if h then
      for i, bound in ipairs(BOUNDS) do line(name, '_bucket{le="', number(bound), '"} ', number(h.counts[i])) end
      line(name, '_bucket{le="+Inf"} ', number(h.count))
      line(name, "_sum ", number(h.sum))
      line(name, "_count ", number(h.count))
    end
  end
  return table.concat(lines, "\n") .. "\n"
end

return Metrics
