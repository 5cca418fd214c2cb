"""Runs ONNX folders in a browser, by transformers.js and ONNX Runtime's WebAssembly.

npm puts the JavaScript into a temporary folder, which a server of this process shows to the browser
beside the models. The page loads nothing else. The browser and the server are fixtures of
conftest.py.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from gguf_models import DEMO, ternarize

from hestia_tune.export.onnx import write_onnx
from hestia_tune.models.folder import ModelFolder

transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime_genai")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("npm"), reason="needs npm (apt-get install npm)"),
]

PACKAGE = "@huggingface/transformers@4.3.1"  # it names the version of onnxruntime-web
PROMPT = "The assert statement"
SCRIPT = """
const [name, prompt, done] = arguments;
async function run() {
  const modules = '/node_modules';
  const { env, AutoTokenizer, AutoModelForCausalLM } = await import(
    `${modules}/@huggingface/transformers/dist/transformers.min.js`
  );
  env.allowRemoteModels = env.useBrowserCache = env.useWasmCache = false;
  env.allowLocalModels = true;
  env.localModelPath = '/models/';
  env.backends.onnx.wasm.wasmPaths = `${modules}/onnxruntime-web/dist/`;
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModelForCausalLM.from_pretrained(name);
  const inputs = await tokenizer(prompt);
  const { logits } = await model(inputs);
  const text = await model.generate({ ...inputs, max_new_tokens: 20, do_sample: false });
  return {
    tokens: Array.from(inputs.input_ids.data, Number),
    logits: Array.from(logits.data),
    text: Array.from(text.data, Number),
    loaded: performance.getEntriesByType('resource').map(entry => entry.name),
  };
}
run().then(done, error => done({ error: String(error.stack) }));
"""


@pytest.fixture(scope="module")
def root():
    """A folder with the ternary demo, ``models/float32`` and ``models/int8``, and JavaScript."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional")
        command = ["npm", "install", "--prefix", folder, *options, PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"needs the packages of npm: {done.stderr.strip()[-300:]}")
        root, dense = Path(folder), Path(folder, "dense")
        source = ModelFolder(dense, ternarize(DEMO, dense, 128))
        for head in ("float32", "int8"):
            write_onnx(source, root / "models" / head, head=head)
        (root / "index.html").write_text("<link rel=icon href=data:,><title>ONNX</title>")
        yield root


@pytest.fixture(scope="module")
def address(root, serve):
    return serve(root)


@pytest.mark.parametrize(("head", "tolerance"), [("float32", 1e-5), ("int8", 0.02)])
@torch.no_grad()
def test_the_browser_gives_the_hard_models_logits_and_text(root, browser, address, head, tolerance):
    """WebAssembly computes the 2-bit products in float32; only the head is rounded to 8 bits."""
    browser.set_script_timeout(120)
    browser.get(f"{address}/index.html")
    found = browser.execute_async_script(SCRIPT, head, PROMPT)
    assert "error" not in found, found["error"]
    tokens = transformers.AutoTokenizer.from_pretrained(root / "dense")(PROMPT).input_ids
    assert found["tokens"] == tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "dense", dtype=torch.float32)
    expected = model(torch.tensor([tokens])).logits
    logits = torch.tensor(found["logits"]).view_as(expected)
    difference = float((logits - expected).norm() / expected.norm())
    assert 0 < difference < tolerance
    assert found["loaded"] and all(name.startswith(address) for name in found["loaded"])
    if head == "float32":
        text = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)
        assert found["text"] == text[0].tolist()
