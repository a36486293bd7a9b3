-- mlua in Neovim (0.7 and later): dofile "/path/to/mlua/editor/nvim/mlua.lua" { trusted = { "~/models" } } in init.lua.
--
-- Buffers of Lua that require "mlua" get the server: errors, hover (K), completion (omnifunc), rename, lines of modules and m.train
-- (code lenses, after each trace), inlay hints (0.10 and later). Scripts run only below the folders of `trusted`; other options: cmd, device, mesh, settings, read, inlayHints, and
-- on_status, a function that gets the parameters, bytes and tokens/s of the script that was traced.
return function(options)
  options = options or {}
  local trusted = {}
  for _, folder in ipairs(options.trusted or {}) do
    local path = vim.fn.fnamemodify(folder, ":p"):gsub("/$", "")
    table.insert(trusted, path)
  end
  local function root_of(path)
    for _, folder in ipairs(trusted) do
      if path:sub(1, #folder + 1) == folder .. "/" then return folder end
    end
    return vim.fn.fnamemodify(path, ":h")
  end
  local clients = {} -- by root

  local function attach(buffer)
    local path = vim.api.nvim_buf_get_name(buffer)
    local head = table.concat(vim.api.nvim_buf_get_lines(buffer, 0, 200, false), "\n")
    if path == "" or not head:find "require *%(?[\"']mlua[\"']" then return end
    local root = root_of(path)
    clients[root] = clients[root] or vim.lsp.start_client {
      name = "mlua", cmd = options.cmd or { "mlua", "lsp" }, root_dir = root,
      workspace_folders = { { uri = vim.uri_from_fname(root), name = root } },
      init_options = {
        trusted = trusted, device = options.device, mesh = options.mesh, settings = options.settings, read = options.read,
        inlayHints = options.inlayHints,
      },
      handlers = {
        ["mlua/status"] = function(_, status)
          vim.lsp.codelens.refresh()
          if options.on_status then options.on_status(status) end
        end,
      },
      on_attach = function(client, attached)
        vim.bo[attached].omnifunc = "v:lua.vim.lsp.omnifunc"
        vim.keymap.set("n", "K", vim.lsp.buf.hover, { buffer = attached })
        if vim.lsp.inlay_hint and options.inlayHints ~= false then vim.lsp.inlay_hint.enable(true, { bufnr = attached }) end
      end,
      on_exit = function() clients[root] = nil end,
    }
    vim.lsp.buf_attach_client(buffer, clients[root])
  end

  vim.api.nvim_create_autocmd("FileType", { pattern = "lua", callback = function(event) attach(event.buf) end })
end
