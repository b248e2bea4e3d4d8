//! Compiles the C++ side against the libtorch that torch-sys found.
use std::env;
use std::path::PathBuf;

fn main() {
    // torch-sys (`links = "tch"`) publishes its library folder; the headers lie beside it.
    let lib = PathBuf::from(env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys did not say where libtorch is"));
    let include = lib.parent().expect("libtorch/lib has a parent").join("include");
    println!("cargo:rerun-if-changed=cc");

    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").warnings(false).define("_GLIBCXX_USE_CXX11_ABI", "1");
    // Gloo is the backend that libtorch has on every platform; `cc/gloo` stands in for the headers it does not ship.
    build.define("USE_DISTRIBUTED", None).define("USE_C10D_GLOO", None).include("cc");
    for folder in [include.clone(), include.join("torch/csrc/api/include")] {
        build.flag("-isystem").flag(folder);
    }
    // Loops of our own: optimised in every profile, and vectorised, for which no operation on numbers may raise a flag.
    let mut loops = build.clone();
    loops.opt_level(3).flag("-fno-math-errno").flag("-fno-trapping-math");
    loops.file("cc/norm.cc").compile("torch_loops");
    build
        .files([
            "cc/attention.cc",
            "cc/autograd.cc",
            "cc/c10d.cc",
            "cc/device.cc",
            "cc/memory.cc",
            "cc/ops.cc",
            "cc/storage.cc",
            "cc/upload.cc",
        ])
        .compile("torch_shim");

    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
}
