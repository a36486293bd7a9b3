-- Small files: their texts are read and written at once.
local text_files = {}

---The bytes of a file; nil where there is none, or a folder.
---@param path string
---@return string?
function text_files.read(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read "a" -- nil: a folder
  file:close()
  return text
end

---Whether there is a file, of any size: nothing of it is read. Not so for a folder.
---@param path string
---@return boolean
function text_files.exists(path)
  local file = io.open(path, "rb")
  if not file then return false end
  local _, problem = file:read(0) -- of a folder; at the end of an empty file there is none
  file:close()
  return problem == nil
end

---Write a file anew.
---@param path string
---@param text string
---@return boolean? written nil, and the problem, where it could not be
---@return string? problem
function text_files.write(path, text)
  local file, problem = io.open(path, "wb")
  if not file then return nil, problem end
  local ok, why = file:write(text)
  local closed, reason = file:close()
  return ok and closed, why or reason
end

return text_files
