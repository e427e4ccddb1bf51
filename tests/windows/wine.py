"""What Wine lacks of Windows, and what stands for it in the trial."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# Without a Visual C++ Redistributable its libraries come from a package; Wine's own are to stay behind them.
OWN_LIBRARIES = ["msvcp140", "msvcp140_1", "msvcp140_2", "vcruntime140", "vcruntime140_1", "concrt140", "vcomp140"]
# CopyFile2 and WMI, which Python 3.13 calls in shutil.copy2 and platform, and what os.getppid calls.
SITE = """import os, _winapi
del _winapi.CopyFile2
def getppid():
    import psutil
    return psutil.Process().ppid()
os.getppid = getppid
"""

MATH, OURS = b"api-ms-win-crt-math-l1-1-0.dll", b"atelier-math.dll"
# Functions of C99, which numpy and scipy call: of one complex number, of one with a real result, of two.
COMPLEX = ("cacos", "cacosh", "casin", "casinh", "catan", "catanh", "ccos", "ccosh", "cexp", "clog", "conj")
COMPLEX += ("cproj", "csin", "csinh", "csqrt", "ctan", "ctanh")
REAL, TWO = ("cabs", "carg", "cimag", "creal"), ("cpow",)
HEAD = """#include <complex.h>
typedef struct { double re, im; } D;
typedef struct { float re, im; } F;
static double _Complex of_d(D a) { return __builtin_complex(a.re, a.im); }
static float _Complex of_f(F a) { return __builtin_complex(a.re, a.im); }
static D to_d(double _Complex z) { D a = {creal(z), cimag(z)}; return a; }
static F to_f(float _Complex z) { F a = {crealf(z), cimagf(z)}; return a; }
#define COMPLEX(n) D our_##n(D a) { return to_d(n(of_d(a))); } D our_##n##l(D a) { return our_##n(a); } \\
    F our_##n##f(F a) { return to_f(n##f(of_f(a))); }
#define REAL(n) double our_##n(D a) { return n(of_d(a)); } double our_##n##l(D a) { return our_##n(a); } \\
    float our_##n##f(F a) { return n##f(of_f(a)); }
#define TWO(n) D our_##n(D a, D b) { return to_d(n(of_d(a), of_d(b))); } \\
    D our_##n##l(D a, D b) { return our_##n(a, b); } \\
    F our_##n##f(F a, F b) { return to_f(n##f(of_f(a), of_f(b))); }
"""
# bcryptprimitives.dll, of which every wheel written in Rust takes its chance.
CHANCE = """#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE to, SIZE_T size) {
    for (SIZE_T now; size; to += now, size -= now) {
        now = size < 1 << 20 ? size : 1 << 20;
        SystemFunction036(to, (ULONG)now);
    }
    return TRUE;
}
"""


def fill_in(site: Path, python: Path, system: Path, work: Path, compiler: str) -> None:
    """Build the functions that Wine lacks, and lead the libraries in a folder of packages to them."""
    ours = {f"{name}{kind}" for name in (*COMPLEX, *REAL, *TWO) for kind in ("", "f", "l")}
    users = {path: names for path in binaries(site) if ours & (names := imported(path))}
    lines = [*(f"COMPLEX({n})" for n in COMPLEX), *(f"REAL({n})" for n in REAL), *(f"TWO({n})" for n in TWO)]
    write(work / "math.c", "\n".join([HEAD, *lines, ""]))
    names = sorted(set[str]().union(*users.values()))
    exports = (f"  {name} = {f'our_{name}' if name in ours else f'ucrtbase.{name}'}" for name in names)
    write(work / "math.def", "\n".join([f"LIBRARY {OURS.decode()}", "EXPORTS", *exports, ""]))
    write(work / "chance.c", CHANCE)
    build = [compiler, "-O1", "-shared", "-static-libgcc", "-o"]
    subprocess.run([*build, python / OURS.decode(), work / "math.c", work / "math.def"], check=True)
    subprocess.run([*build, system / "bcryptprimitives.dll", work / "chance.c", "-ladvapi32"], check=True)
    for path in users:
        path.write_bytes(path.read_bytes().replace(MATH + b"\0", OURS.ljust(len(MATH), b"\0") + b"\0"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def binaries(site: Path) -> Iterable[Path]:
    """Yield the libraries of a folder of packages that name the one with the functions."""
    for path in site.rglob("*"):
        if path.suffix.lower() in (".pyd", ".dll") and re.search(re.escape(MATH), path.read_bytes(), re.IGNORECASE):
            yield path


def imported(path: Path) -> set[str]:
    """Read the names that a library imports from that one."""
    import pefile  # a package of the trial

    library = pefile.PE(str(path), fast_load=True)
    library.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
    entries = (each for each in getattr(library, "DIRECTORY_ENTRY_IMPORT", []) if each.dll.lower() == MATH)
    return {name.name.decode() for each in entries for name in each.imports if name.name}
