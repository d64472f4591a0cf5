// Runs pytest in Pyodide. Arguments: the checkout, the folder of the libraries, the folder for reports, and pytest's.
import { loadPyodide } from "pyodide";

const [root, site, out, ...words] = process.argv.slice(2);
const python = await loadPyodide();
for (const [name, folder] of Object.entries({ "/checkout": root, "/site": site, "/out": out })) {
  python.FS.mkdirTree(name);
  python.FS.mount(python.FS.filesystems.NODEFS, { root: folder }, name);
}
python.globals.set("words", python.toPy(words));
const code = python.runPython(`
import os, platform, sys
os.chdir("/checkout")
sys.path[:0] = ["/checkout", "/site"]
sys.dont_write_bytecode = True
import pytest, redis
print(platform.python_version(), redis.__version__)
int(pytest.main(list(words)))
`);
process.exit(code);
