{{- /* What the schema of the values cannot say: values that do not go together. */}}
{{- define "checks" -}}
{{- $v := .Values }}
{{- if and (gt (int $v.replicas) 1) (ne $v.store.kind "etcd") }}
  {{- fail (printf "replicas: %d, but store.kind: %s is of one replica alone. Set store.kind: etcd, or replicas: 1." (int $v.replicas) $v.store.kind) }}
{{- end }}
{{- if not (or $v.tls.enabled $v.insecure) }}
  {{- fail "tls.enabled: false lets everybody on the way read tokens and give orders. Set tls.enabled: true, or insecure: true in a cluster of your own." }}
{{- end }}
{{- if and $v.tls.secret $v.tls.issuer.name }}
  {{- fail "tls.secret and tls.issuer.name: the certificate is made by others, or by that issuer. Leave one of them empty." }}
{{- end }}
{{- if and (or $v.tls.secret $v.tls.issuer.name) (not $v.tls.enabled) }}
  {{- fail "tls.secret and tls.issuer.name mean nothing while tls.enabled is false." }}
{{- end }}
{{- if eq $v.store.kind "etcd" }}
  {{- include "checks.etcd" . }}
{{- else if $v.store.etcd.endpoints }}
  {{- fail (printf "store.etcd.endpoints mean nothing while store.kind is %s." $v.store.kind) }}
{{- end }}
{{- include "checks.extraEnv" . }}
{{- end }}

{{- define "checks.etcd" -}}
{{- $v := .Values }}
{{- with $v.store.etcd }}
  {{- if and .managed (or .endpoints .secret) }}
    {{- fail "store.etcd.endpoints and store.etcd.secret are of an etcd that others manage. Set store.etcd.managed: false, or leave them empty." }}
  {{- end }}
  {{- if not (or .managed .endpoints) }}
    {{- fail "store.etcd.managed: false, and no store.etcd.endpoints: where is etcd?" }}
  {{- end }}
  {{- if not (or .managed .secret $v.insecure) }}
    {{- fail "store.etcd.secret is empty: whoever reaches that etcd can rewrite every job. Name the secret with its certificates, or set insecure: true." }}
  {{- end }}
  {{- if and (not .managed) $v.networkPolicy.enabled (not $v.networkPolicy.etcd) }}
    {{- fail "networkPolicy.etcd is empty: the service may not go to that etcd. Say where it is, or set networkPolicy.enabled: false." }}
  {{- end }}
{{- end }}
{{- if and $v.store.etcd.managed (ne (empty $v.etcd.tls.secret) (empty $v.etcd.tls.clientSecret)) }}
  {{- fail "etcd.tls.secret and etcd.tls.clientSecret go together: cert-manager makes both, or neither." }}
{{- end }}
{{- end }}

{{- define "checks.extraEnv" -}}
{{- $fixed := list "POD_NAME" "POD_NAMESPACE" "DDP_RENDEZVOUS_LISTEN" "DDP_RENDEZVOUS_ADVERTISE" "DDP_RENDEZVOUS_HTTP" "DDP_RENDEZVOUS_LOG_FORMAT" }}
{{- $from := dict "STORE" "store" "INSECURE" "insecure" "TLS_CERT" "tls" "TLS_KEY" "tls" "CLIENT_CA" "tls" "TOKEN_KEYS" "tokens" }}
{{- range .Values.extraEnv }}
  {{- if has .name $fixed }}
    {{- fail (printf "extraEnv: %s is set by the chart: services and probes rest on it." .name) }}
  {{- end }}
  {{- $value := get $from (trimPrefix "DDP_RENDEZVOUS_" .name) }}
  {{- if and $value (hasPrefix "DDP_RENDEZVOUS_" .name) }}
    {{- fail (printf "extraEnv: %s is set by the chart. Set the values of `%s` instead." .name $value) }}
  {{- end }}
{{- end }}
{{- end }}
