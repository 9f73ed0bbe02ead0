//! Permitted dependencies: the layers of ARCHITECTURE.md, checked against the manifests.

use anyhow::{Result, bail};

use crate::process;

/// Each crate with the crates of this workspace it may depend on. The binary wires them all.
const ALLOWED: &[(&str, &[&str])] = &[
    ("folio-formats", &[]),
    ("folio-scheduler", &[]),
    // For tests and chores only. Weights in memory are a feature of it.
    ("folio-testing", &["folio-formats"]),
    ("folio-simulator", &["folio-scheduler"]),
    ("folio-text", &[]),
    ("folio-device", &["folio-formats"]),
    ("folio-model", &["folio-device", "folio-formats"]),
    ("folio-quantize", &["folio-model", "folio-device", "folio-formats"]),
    ("folio-engine", &["folio-scheduler", "folio-model", "folio-device", "folio-formats"]),
    ("folio-server", &["folio-text", "folio-engine"]),
    // All of them under its feature `models`, without which xtask links it.
    (
        "folio-measure",
        &["folio-session", "folio-quantize", "folio-text", "folio-engine", "folio-model", "folio-device"],
    ),
    (
        "folio-session",
        &["folio-engine", "folio-text", "folio-model", "folio-device", "folio-formats", "folio-scheduler"],
    ),
    (
        "folio",
        &[
            "folio-formats",
            "folio-measure",
            "folio-scheduler",
            "folio-text",
            "folio-device",
            "folio-model",
            "folio-quantize",
            "folio-engine",
            "folio-server",
            "folio-session",
        ],
    ),
    ("xtask", &["folio-formats", "folio-measure", "folio-testing"]),
];

/// A crate of this workspace, and the others that its manifest names.
struct Crate {
    name: String,
    dependencies: Vec<String>,
    test_dependencies: Vec<String>,
}

pub fn check() -> Result<()> {
    let mut wrong = Vec::new();
    for Crate { name, dependencies, .. } in crates()? {
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            wrong.push(format!("{name} is not in the crate graph of xtask/src/graph.rs"));
            continue;
        };
        // Tests may use any lower layer.
        let refused = dependencies.iter().filter(|target| !allowed.contains(&target.as_str()));
        wrong.extend(refused.map(|target| format!("{name} may not depend on {target}")));
    }
    if !wrong.is_empty() {
        bail!("crate graph:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

/// Prints the edges that the manifests have, crate by crate.
pub fn print() -> Result<()> {
    for Crate { name, dependencies, test_dependencies } in crates()? {
        println!("{name}");
        dependencies.iter().for_each(|target| println!("  -> {target}"));
        test_dependencies.iter().for_each(|target| println!("  -> {target} (tests)"));
    }
    Ok(())
}

/// In the order of `ALLOWED`; those that it does not name come last.
fn crates() -> Result<Vec<Crate>> {
    let metadata = process::output(&mut process::cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let place = |name: &str| ALLOWED.iter().position(|(known, _)| *known == name);
    let mut crates: Vec<Crate> = metadata["packages"].as_array().into_iter().flatten().map(read).collect();
    crates.sort_by_key(|found| place(&found.name).unwrap_or(ALLOWED.len()));
    for Crate { dependencies, test_dependencies, .. } in &mut crates {
        dependencies.retain(|target| place(target).is_some());
        test_dependencies.retain(|target| place(target).is_some());
    }
    Ok(crates)
}

fn read(package: &serde_json::Value) -> Crate {
    let targets = |of_tests: bool| {
        let all = package["dependencies"].as_array().into_iter().flatten();
        let of_kind = all.filter(|dependency| (dependency["kind"].as_str() == Some("dev")) == of_tests);
        of_kind.filter_map(|dependency| dependency["name"].as_str().map(String::from)).collect()
    };
    let name = package["name"].as_str().unwrap_or_default().to_owned();
    Crate { name, dependencies: targets(false), test_dependencies: targets(true) }
}
