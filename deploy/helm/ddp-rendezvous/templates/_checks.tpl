{{- /* Checks that the schema cannot express: combinations of values. */}}
{{- define "checks" -}}
{{- $v := .Values }}
{{- if and (gt (int $v.replicas) 1) (ne $v.store.kind "etcd") }}
  {{- fail (printf "replicas: %d, but store.kind: %s supports only one replica. Set store.kind: etcd, or replicas: 1." (int $v.replicas) $v.store.kind) }}
{{- end }}
{{- if not (or $v.tls.enabled $v.insecure) }}
  {{- fail "tls.enabled: false exposes tokens and commands on the network. Set tls.enabled: true, or insecure: true on a cluster that you do not share." }}
{{- end }}
{{- if and $v.tls.secret $v.tls.issuer.name }}
  {{- fail "tls.secret and tls.issuer.name are both set: use your own certificate or that issuer. Leave one of them empty." }}
{{- end }}
{{- if and (or $v.tls.secret $v.tls.issuer.name) (not $v.tls.enabled) }}
  {{- fail "tls.secret and tls.issuer.name have no effect while tls.enabled is false. Set tls.enabled: true, or leave them empty." }}
{{- end }}
{{- if eq $v.store.kind "etcd" }}
  {{- include "checks.etcd" . }}
{{- else if $v.store.etcd.endpoints }}
  {{- fail (printf "store.etcd.endpoints has no effect while store.kind is %s. Set store.kind: etcd, or leave it empty." $v.store.kind) }}
{{- end }}
{{- include "checks.extraEnv" . }}
{{- end }}

{{- define "checks.etcd" -}}
{{- $v := .Values }}
{{- with $v.store.etcd }}
  {{- if and .managed (or .endpoints .secret) }}
    {{- fail "store.etcd.endpoints and store.etcd.secret are only for your own etcd. Set store.etcd.managed: false, or leave them empty." }}
  {{- end }}
  {{- if not (or .managed .endpoints) }}
    {{- fail "store.etcd.managed is false and store.etcd.endpoints is empty: the service has no etcd. Set one of them." }}
  {{- end }}
  {{- if not (or .managed .secret $v.insecure) }}
    {{- fail "store.etcd.secret is empty: every client of that etcd can rewrite every job. Name the secret with its certificates, or set insecure: true." }}
  {{- end }}
  {{- if and (not .managed) $v.networkPolicy.enabled (not $v.networkPolicy.etcd) }}
    {{- fail "networkPolicy.etcd is empty: the policy blocks the service from your etcd. Set its addresses, or set networkPolicy.enabled: false." }}
  {{- end }}
{{- end }}
{{- if and $v.store.etcd.managed (ne (empty $v.etcd.tls.secret) (empty $v.etcd.tls.clientSecret)) }}
  {{- fail "only one of etcd.tls.secret and etcd.tls.clientSecret is set. Set both, or leave both to cert-manager." }}
{{- end }}
{{- end }}

{{- define "checks.extraEnv" -}}
{{- $fixed := list "POD_NAME" "POD_NAMESPACE" "DDP_RENDEZVOUS_LISTEN" "DDP_RENDEZVOUS_ADVERTISE" "DDP_RENDEZVOUS_HTTP" "DDP_RENDEZVOUS_LOG_FORMAT" }}
{{- $from := dict "STORE" "store" "INSECURE" "insecure" "TLS_CERT" "tls" "TLS_KEY" "tls" "CLIENT_CA" "tls" "TOKEN_KEYS" "tokens" "JOURNAL_DIR" "journals" "JOURNAL_SPACE" "journals" }}
{{- range .Values.extraEnv }}
  {{- if has .name $fixed }}
    {{- fail (printf "extraEnv: %s is set by the chart, and services and probes depend on it. Remove it." .name) }}
  {{- end }}
  {{- $value := get $from (trimPrefix "DDP_RENDEZVOUS_" .name) }}
  {{- if and $value (hasPrefix "DDP_RENDEZVOUS_" .name) }}
    {{- fail (printf "extraEnv: %s is set by the chart. Set the values of `%s` instead." .name $value) }}
  {{- end }}
{{- end }}
{{- end }}
