mod oracle;
use cowshed_jobs::convert::{self, ConvertOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use oracle::{Bench, run};
#[test]
fn scratch() {
    let bench = Bench::new();
    bench.pattern("a.raw", 4 << 20, 31);
    let requests = std::env::var("M").unwrap_or("8".into()).parse().unwrap();
    let mut o = ConvertOptions::new(vec![ImageSpec::file(bench.path("a.raw")).format("raw")], ImageSpec::file(bench.path("b.qcow2")).format("qcow2"));
    o.requests = requests;
    if let Ok(c) = std::env::var("O") { o.create_options.push(c); }
    if std::env::var("N").is_ok() { 
        bench.qemu_img(&["create", "-q", "-f", "qcow2", "b.qcow2", "4M"]);
        bench.qemu_io("b.qcow2", &["write -P 5 0 4M"]);
        o.skip_create = true; }
    o.compressed = std::env::var("C").is_ok();
    let job = JobHandle::watched(|p| eprintln!("{p:?}"));
    run(convert::run(&o, &job)).expect("ok");
}
