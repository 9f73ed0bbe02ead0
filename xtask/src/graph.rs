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
    ("folio-measure", &[]),
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

pub fn check() -> Result<()> {
    let metadata = process::output(&mut process::cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            wrong.push(format!("{name} is not in the crate graph of xtask/src/graph.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let ours = ALLOWED.iter().any(|(known, _)| *known == target);
            // Tests may use any lower layer.
            if ours && dependency["kind"].as_str() != Some("dev") && !allowed.contains(&target) {
                wrong.push(format!("{name} may not depend on {target}"));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("crate graph:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}
